"""Low-bit weights: codebook × scale, learned in training, frozen as codes."""
