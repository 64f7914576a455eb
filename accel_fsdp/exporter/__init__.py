"""The command `accel-fsdp export`: from a checkpoint of any kind to a verified Hugging Face model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
