"""Predicts a job's memory and step time, and searches for a layout that fits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
