"""The data, model, rewards and evaluation of each experiment."""
