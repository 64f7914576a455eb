"""`python -m accel_fsdp` is `accel-fsdp`."""

from accel_fsdp.cli import main

main()
