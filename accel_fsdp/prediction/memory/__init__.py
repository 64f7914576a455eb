"""Predicts the memory of one rank, event by event over one training step, to the byte."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
