"""The command `accel-fsdp check`: what it reads, and how it reports and repairs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
