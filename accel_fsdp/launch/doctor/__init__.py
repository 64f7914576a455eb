"""The command `accel-fsdp doctor`: what is wrong with this machine, and between the machines of a job."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
