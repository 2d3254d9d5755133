"""Reinforcement learning: GRPO with static shapes."""

# The choices of two options, defined here so that --help need not import torch.
REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo")  # how token losses are averaged
SCALES = ("group", "batch", "none")  # whose standard deviation advantages are divided by
