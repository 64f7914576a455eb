"""The command `accel-fsdp plan`: the recommended settings, the reasons, and their YAML."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
