"""Code that runs inside a rank: FSDP on gloo for any script, and events about what the rank holds and does."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
