"""Distillation from a cache of the teacher's next-token distributions."""
