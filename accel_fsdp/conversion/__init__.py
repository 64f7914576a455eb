"""The command `accel-fsdp migrate`: translates the settings of one engine to another."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
