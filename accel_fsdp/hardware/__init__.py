"""GPUs and machines: by name, as people write them, and as found on this host."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
