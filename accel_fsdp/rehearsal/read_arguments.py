"""`python -m accel_fsdp.rehearsal.read_arguments WORDS` parses the words as `train/sft.py` does, and exits."""

import sys

from accel_fsdp.config import SCRIPT
from accel_fsdp.errors import guard
from accel_fsdp.ranks import cpu


def main() -> None:
    """Ends with the error of the real job, if it has one."""
    from accel_fsdp.training import arguments

    cpu.begin_rank()
    sys.argv[0] = SCRIPT
    arguments.parse()


if __name__ == "__main__":
    sys.exit(guard(main))
