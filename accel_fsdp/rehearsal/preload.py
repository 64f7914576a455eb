"""What a rehearsal's processes need of the libraries; imported for its own sake, once, before they are forked."""

import gc

from torch.distributed import checkpoint, fsdp, tensor  # noqa: F401
from torch.optim import adamw  # noqa: F401
from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

from accel_fsdp.exporter import verification  # noqa: F401
from accel_fsdp.training import arguments, losses, trainer  # noqa: F401
from accel_fsdp.training.data import batching, tokenizing  # noqa: F401

gc.collect()
gc.freeze()  # else each process looks through all of it whenever it collects garbage
