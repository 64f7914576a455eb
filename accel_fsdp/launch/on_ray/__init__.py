"""Runs a job on Ray: functions for the driver that `accel-fsdp script ray` writes, and for Ray's workers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
