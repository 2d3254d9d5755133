"""Model code: loading HF models and the experiments' own architectures."""
