"""Plain single-device PyTorch models, their weights, and converters to and from the published checkpoints."""
