"""Athena v2: a small network that solves puzzles by recursion."""

# Bounds and defaults of options, defined here so that --help does not import torch.
ANY = 2**31  # numbers in datasets are stored as int32
LARGE = 2**40  # upper bound of a size: products of a few larger sizes overflow a float
NOISE = 1.0  # standard deviation of the noise between attempts (docs/athena.md)
