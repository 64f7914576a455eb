"""What the plan says of the memory of each file that `accel-fsdp check` has read."""

from collections.abc import Iterator

from accel_fsdp import linter
from accel_fsdp.config import yaml_file
from accel_fsdp.errors import UserError
from accel_fsdp.prediction import verdict
from accel_fsdp.prediction.tracing import by_name


def warnings(options: linter.CheckCommand) -> Iterator[str]:
    """A line for each file whose job is predicted not to fit the GPUs in its header."""
    for path in (path for path in options.files if str(path) != yaml_file.STDIN):
        try:
            subject, _ = linter.read_subject(path, options)
        except UserError:  # reported by the linter
            continue
        if text := verdict(subject, subject.args or {}, by_name.read_shape):
            yield f"{path}: warning: {text}"
