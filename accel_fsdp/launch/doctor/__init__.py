"""The command `accel-fsdp doctor`: what this machine is, what is wrong with it, and how fast the links of a job are."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
