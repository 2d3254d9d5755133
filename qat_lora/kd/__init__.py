"""Distillation from a cache of the teacher's next-token distributions."""

DRAWS = 12  # tail tokens sampled per position, unless build_kd_cache.py is told otherwise
