"""The command `accel-fsdp config`: questions, defaults, refusals, and the conversion between answers and YAML."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
