"""The plan of the current run: its layout and recipe, its peak memory, and changes that would lower it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from accel_fsdp import console
from accel_fsdp.errors import UsageError
from accel_fsdp.hardware import Gpu, gpus
from accel_fsdp.job import Job
from accel_fsdp.prediction import changes, predicted, speed
from accel_fsdp.prediction.memory import ModelShape, Tapes, variant_of
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import GIB, gib_or_mib

SHOWN_SAVINGS = 5


@dataclass(frozen=True)
class Forecast:
    """A job with its model's shape and tapes, which take seconds to read the first time."""

    job: Job
    shape: ModelShape
    tapes: Mapping[str, Tapes]

    def peak_bytes(self, rows: int, length: int, gpu: Gpu | None) -> int:
        """The peak bytes that one rank allocates in a step of this batch."""
        job = self.job.with_recipe(rows=rows, length=length, eval_batch=0)
        return predicted(self.shape, self.tapes, job, gpu).peak.total

    def mfu(self, tokens_per_s: float, length: float, gpu: Gpu) -> float:
        """The MFU of training at this rate on documents of a mean `length`."""
        recipe = replace(self.job.recipe, rows=1, length=max(round(length), 1))
        flops_per_token = speed.useful_flops(self.shape, recipe) / recipe.length
        return tokens_per_s * flops_per_token / (self.job.layout.ranks * speed.peak_flops(recipe, gpu))

    def advice(self, rows: int, length: int) -> list[str]:
        """Changes that would free memory, the largest first, as lines of text."""
        job = self.job.with_recipe(rows=rows, length=length, eval_batch=0)
        peak = self.peak_bytes(rows, length, None)
        options = [
            (peak - predicted(self.shape, self.tapes, change.job, None).peak.total, change)
            for change in (*changes.changes(job), *changes.others(job))
        ]
        lower = sorted((option for option in options if option[0] > 0), key=lambda option: -option[0])[:SHOWN_SAVINGS]
        return [f"{gib_or_mib(freed, gib_from=GIB / 10)} less: {change.words}" for freed, change in lower]


def read(job: Job) -> Forecast:
    """Reads the model's shape and tapes: bundled, cached, or recorded now, with this process's random state kept.

    Raises:
        UserError: the model can't be read.
        RuntimeError: it can't be recorded.
    """
    import torch

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), console.waiting("Reading the model for the plan"):
        forecast = Forecast(job, *by_name.read_shape(job.model, job.recipe))
        forecast.tapes[variant_of(job.recipe, job.layout.engine)]  # recorded here, if it has to be
        return forecast


def gpu_here() -> tuple[Gpu | None, str]:
    """The GPU of this rank if the table has it; else None, and why its peak is unknown."""
    import torch

    if not torch.cuda.is_available():
        return None, "the peak of what isn't a GPU is not known"
    name = torch.cuda.get_device_name()
    try:
        return gpus.find(name, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB), ""
    except UsageError:
        return None, f"{name} is not in the table of GPUs"
