"""A small model of the same architecture as a real one: fewer layers, narrower, with the same kinds and ties."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
