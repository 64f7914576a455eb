"""Reads a model without its weights: from its config, its folder, or the bundled catalogue."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
