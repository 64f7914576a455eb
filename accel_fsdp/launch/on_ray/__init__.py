"""A job on Ray: what the driver that `accel-fsdp script ray` writes calls, and what Ray's workers run for it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
