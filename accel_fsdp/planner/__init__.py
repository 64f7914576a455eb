"""The command `accel-fsdp plan`: what to take, why, and the YAML that does it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
