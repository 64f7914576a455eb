"""Imports the libraries that a rehearsal's processes need, once, before the processes are forked."""

import contextlib
import gc


def load() -> None:
    from torch.distributed import checkpoint, fsdp, tensor  # noqa: F401
    from torch.optim import adamw  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

    with contextlib.suppress(Exception):  # an installation may be broken; Accelerate and transformers look for it
        import deepspeed  # noqa: F401
    from accel_fsdp.exporter import command, verification  # noqa: F401
    from accel_fsdp.models import inspect_model  # noqa: F401
    from accel_fsdp.ranks import HOLD_AFTER  # noqa: F401
    from accel_fsdp.training import arguments, begin, losses, together, trainer  # noqa: F401
    from accel_fsdp.training.data import batching, tokenizing  # noqa: F401
    from accel_fsdp.training.reporting import model_card, run_record  # noqa: F401

    with contextlib.suppress(ImportError):  # creates a table of all architectures, as the first load of a model does
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


gc.disable()  # garbage collection took a fifth of the imports' time
load()
gc.collect()
gc.freeze()  # otherwise each process examines all of it whenever it collects garbage
gc.enable()
