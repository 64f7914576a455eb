"""Checkpoints and exports on disk: found, judged and opened, without running code from them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
