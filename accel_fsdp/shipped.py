"""The folder of the training scripts, ready-made YAMLs and pages: inside an installed package, beside it in a clone."""

from pathlib import Path

PACKAGE = Path(__file__).parent
SHIPPED = PACKAGE / "project"
"""The folder of `train/`, `accelerate_configs/` and `docs/` in the wheel."""


def source() -> Path:
    return SHIPPED if SHIPPED.is_dir() else PACKAGE.parent
