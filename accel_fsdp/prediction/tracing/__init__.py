"""Records the allocations of a model's blocks: on fake tensors, once for each model, without weights or a GPU."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
