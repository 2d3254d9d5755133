"""Low-bit weights: a codebook times a learned scale, trained as latent weights and frozen as codes."""
