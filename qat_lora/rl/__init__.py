"""Reinforcement learning: GRPO on static shapes."""

# The choices of two options, here so that --help need not import torch.
REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")  # how the losses of tokens become one
SCALES = ("group", "batch", "none")  # what advantages are divided by the spread of
