"""The checks of a machine's devices, and their report."""
