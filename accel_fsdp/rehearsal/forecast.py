"""The plan's prediction of the real job, beside the rehearsal of the small one."""

from accel_fsdp import flag_words
from accel_fsdp.config import JobConfig
from accel_fsdp.errors import UserError
from accel_fsdp.job import from_yaml
from accel_fsdp.prediction import predicted
from accel_fsdp.prediction.tracing import by_name
from accel_fsdp.units import about_gib, counted


def of_job(job: JobConfig, model: str | None, words: tuple[str, ...]) -> str:
    """A sentence with the peak of one rank of the real job; empty if the planner can't predict it."""
    if model is None:
        return ""
    try:
        real = from_yaml.predictable(job, flag_words.parse_command_line(words))
        peak = predicted(*by_name.read_shape(model, real.recipe), real, None).peak.total
    except (UserError, RuntimeError, KeyError):
        return ""
    batch = f"{counted(real.recipe.rows, 'row')} of {real.recipe.length} tokens"
    ranks = counted(real.layout.ranks, "rank")
    return f"predicted for the real job: {about_gib(peak)} at the peak of each of {ranks} ({real.layout.name}, {batch})"
