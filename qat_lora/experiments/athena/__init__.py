"""Athena v2: a small network that solves puzzles by recursion."""

# Bounds of options, here so that --help need not import torch.
ANY = 2**31  # numbers in datasets are stored as int32
LARGE = 2**40  # upper bound of a size: products of a few larger ones leave the range of a float
