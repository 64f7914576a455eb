"""What a job will need and how fast it will be: memory, step time, and the search for a layout that fits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
