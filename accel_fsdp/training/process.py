"""Starts and ends the process of a rank."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed

from accel_fsdp import atomic_files
from accel_fsdp.ranks import cpu
from accel_fsdp.training.divergence import Diverged
from accel_fsdp.training.reporting import run_record
from accel_fsdp.training.trainer import SftTrainer, check_libraries


def finish(exit_code: int) -> None:
    """Ends the process group, and on CPU the process (see `cpu.finish`).

    After a failure the other ranks may be inside a collective, and ending the group would wait for them.
    """
    cpu.finish(exit_code)
    if exit_code == 0 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def begin(model: Any, data: Any, training: TrainingArguments) -> run_record.RunRecord:
    """Sets the seed, and starts the record of a run with these arguments.

    Turns off the progress bars of other ranks, and the libraries' advice on their APIs.
    """
    atomic_files.check_writable(Path(training.output_dir))
    check_libraries()
    set_seed(training.seed)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.|transformers\.|accel_fsdp\.cpu")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.distributed\.")
    noise = ("The tokenizer has new PAD/BOS/EOS tokens", "Warning: The following arguments do not match")
    loader = logging.getLogger("transformers.trainer_utils")  # once per rank; `resuming.check` refuses what matters
    loader.addFilter(lambda record: not str(record.msg).startswith(noise))
    if training.process_index != 0:
        import datasets
        from transformers.utils.logging import disable_progress_bar

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        disable_progress_bar()
        datasets.disable_progress_bars()
    arguments = {"model": asdict(model), "data": asdict(data), "training": training.to_dict()}  # to_dict hides tokens
    return run_record.RunRecord(Path(training.output_dir), arguments, first_rank=training.process_index == 0)


@contextlib.contextmanager
def recorded(record: run_record.RunRecord, trainer: SftTrainer) -> Iterator[None]:
    """Records the training in the block: the steps of this session, and whether they diverged."""
    try:
        yield
    except Diverged:
        record.content.update(trainer.checkpoints.history.account(trainer.state.global_step))
        record.finish(trainer.state.log_history, trainer.report.totals(), status="diverged")
        raise
    record.lap("training")
    record.content.update(trainer.checkpoints.history.account(trainer.state.global_step))
