"""The command `accel-fsdp rehearse`: a job in small, on the CPU of this machine, step by step; what it proves."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
