"""The command `accel-fsdp config`: questions, defaults, refusals, and the way from answers to a YAML and back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
