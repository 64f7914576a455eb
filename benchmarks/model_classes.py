"""Whether each image, audio and encoder-decoder model is read as its own class: `python benchmarks/model_classes.py`.

The default config of every `...ForConditionalGeneration` of transformers is written with that class in `architectures`
and read by `models.read_model`; the class itself, built once on the meta device, is what it is compared with. Ends
with 1 if any differs. `--write` keeps the numbers in RESULTS.md.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import results
import torch
import transformers

from accel_fsdp import models
from accel_fsdp.errors import UserError

SUFFIX = "ForConditionalGeneration"
SAME, NO_DEFAULT, OTHER = "the same", "transformers builds none from its own default", "another"


def compared(name: str, folder: Path) -> str:
    """What `read_model` makes of a class's default config, beside the class itself."""
    kind = getattr(transformers, name)
    try:
        config = kind.config_class(architectures=[name])
        with torch.device("meta"):
            built = kind(config)
    except Exception:  # a default that lacks a part, or a package that isn't installed
        return NO_DEFAULT
    config = kind.config_class(architectures=[name])
    config.save_pretrained(folder / name)
    try:
        facts = models.read_model(str(folder / name))
    except UserError as error:
        return f"{OTHER}: {error.what}"
    classes = {type(module).__name__ for module in built.modules()}
    alike = facts.parameters == sum(parameter.numel() for parameter in built.parameters()) and facts.classes == classes
    return SAME if alike and facts.wrap_classes == models.wrap_classes(built) else OTHER


def main() -> int:
    """Prints each class that differs, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in RESULTS.md")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = sorted(name for name in dir(transformers) if name.endswith(SUFFIX))
    with tempfile.TemporaryDirectory() as folder:
        by_name = {name: compared(name, Path(folder)) for name in names}
    for name, verdict in by_name.items():
        if verdict != SAME:
            sys.stdout.write(f"{name}: {verdict}\n")
    sums = Counter(verdict.partition(":")[0] for verdict in by_name.values())
    lines = [f"- {verdict}: {count}" for verdict, count in sums.items()]
    sys.stdout.write("\n".join([*lines, ""]))
    if options.write:
        head = f"""## Classes of models

`python benchmarks/model_classes.py --write`: the default config of each `...{SUFFIX}` of transformers
{transformers.__version__}, as `models.read_model` builds it, beside the class itself: parameters, classes of modules
and layers to wrap.
"""
        results.keep("model classes", [*head.splitlines(), "", *lines])
    return 1 if sums[OTHER] else 0


if __name__ == "__main__":
    sys.exit(main())
