"""The command `accel-fsdp rehearse`: a small version of a job on this machine's CPU, and what that proves."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
