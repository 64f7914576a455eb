"""The folder of the training scripts and ready-made YAMLs: inside an installed package, beside it in a clone."""

from pathlib import Path

PACKAGE = Path(__file__).parent
SHIPPED = PACKAGE / "project"
"""The folder of `train/` and `accelerate_configs/` in the wheel."""


def source() -> Path:
    return SHIPPED if SHIPPED.is_dir() else PACKAGE.parent
