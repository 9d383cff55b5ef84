"""Sequence parallelism for unmodified PyTorch models through ``torch.compile(model, backend="autosp")``."""
