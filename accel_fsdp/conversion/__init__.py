"""The command `accel-fsdp convert`: rewrites a checkpoint for another engine or number of ranks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
