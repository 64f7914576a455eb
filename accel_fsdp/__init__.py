"""accel-fsdp: from "this model, these GPUs" to a trained, exported model."""

__version__ = "0.1.0"
