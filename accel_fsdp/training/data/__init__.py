"""From data sets to batches: rows, chat templates, tokens, packing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
