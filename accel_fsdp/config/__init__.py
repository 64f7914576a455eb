"""The Accelerate YAML: its keys, typed access to its values, and edits that keep comments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
