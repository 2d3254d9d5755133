"""A run: configuration, directory, checkpoints, schedule, metrics, plots."""
