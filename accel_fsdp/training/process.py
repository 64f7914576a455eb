"""Starts and ends the process of a rank."""

import logging
import warnings

import torch
from transformers import TrainingArguments, set_seed

from accel_fsdp import cpu
from accel_fsdp.training.trainer import check_libraries


def finish(exit_code: int) -> None:
    """Ends the process group, and on CPU the process (see `cpu.finish`).

    After a failure the other ranks may be inside a collective, and ending the group would wait for them.
    """
    cpu.finish(exit_code)
    if exit_code == 0 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def begin(args: TrainingArguments) -> None:
    """Sets the seed. Turns off the progress bars of other ranks, and the libraries' advice on their APIs.

    Raises:
        UserError: a library has changed inside.
    """
    check_libraries()
    set_seed(args.seed)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.|transformers\.|accel_fsdp\.cpu")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.")
    noise = ("The tokenizer has new PAD/BOS/EOS tokens", "Warning: The following arguments do not match")
    loader = logging.getLogger("transformers.trainer_utils")  # once per rank; `resuming.check` refuses what matters
    loader.addFilter(lambda record: not str(record.msg).startswith(noise))
    if args.process_index != 0:
        import datasets
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        datasets.disable_progress_bars()
