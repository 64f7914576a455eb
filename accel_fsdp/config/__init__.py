"""The Accelerate YAML: its keys, what a file says, what can't be combined, and edits that keep its comments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
