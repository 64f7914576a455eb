"""The parts of `train/sft.py`: flags, model, Trainer, checkpoints, resuming, reports."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
