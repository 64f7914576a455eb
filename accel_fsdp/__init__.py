"""accel-fsdp: from "this model, these GPUs" to a trained, exported model."""

import logging

__version__ = "0.1.0"

# transformers imports PEFT, and that bitsandbytes, which warns on CPUs of a kernel that training doesn't use (0.50)
logging.getLogger("bitsandbytes.backends.cpu").setLevel(logging.ERROR)
