"""The small job of most tests; and several jobs in the ranks of one launch, which `probe.py` runs.

Most of a launch is imports.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import ROOT, accelerate_launch, made_yaml
from reference import job_words, losses_of
from transformers import AutoTokenizer

PROBE = ROOT / "tests" / "probe.py"
Words = Sequence[str | Path]
STEPS, PER_RANK, RANKS = 4, 2, 2
TOLERANCE = 1e-4


def make_config(folder: Path, model: Path, **flags: str) -> Path:
    """A YAML from the wizard's answers, as `accel-fsdp config --yes` writes it."""
    path = folder / "fsdp.yaml"
    path.write_text(made_yaml(**{"model": str(model), "num_processes": str(RANKS), "mixed_precision": "no", **flags}))
    return path


def save(model: Any, folder: Path, tokenizer_of: Path) -> Path:
    """A model's folder, with the tokenizer of another one."""
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_of).save_pretrained(folder)
    return folder


def sft_args(model: Path, data: Path, output: Path, *more: str | Path) -> list[str]:
    return [*job_words(model, data, output, STEPS, PER_RANK, save_steps=STEPS), *map(str, more)]


def logged_losses(run: Path) -> list[float]:
    return losses_of(run, STEPS)


@dataclass(frozen=True)
class Jobs:
    """Runs that were made together: the folder of all of them, and what each printed."""

    folder: Path
    printed: dict[str, str]

    def noted(self, name: str, rank: int = 0) -> dict[str, Any]:
        """What a rank logged and held at the end of a run."""
        noted: dict[str, Any] = json.loads((self.folder / f"{name}-rank{rank}.json").read_text())
        return noted

    def logits(self, name: str) -> torch.Tensor:
        """What a run's model computed before it was exported."""
        logits: torch.Tensor = torch.load(self.folder / f"{name}-logits.pt", weights_only=True)
        return logits


def launch(
    jobs: Mapping[str, Words],
    folder: Path,
    launcher: Words = (),
    refused: Sequence[str] = (),
    script: Path = PROBE,
    **environment: str,
) -> Jobs:
    """Runs jobs into folders of their names, each under the `--config_file` among its words, or the one before it.

    Those that are `refused` end with an error on all ranks.
    """
    (_, config, *words), variables = probed(jobs, folder)
    finished = accelerate_launch(
        Path(config), script, *words, launcher=[*map(str, launcher)], **variables, **environment
    )
    assert finished.code == 0, finished.output
    made = Jobs(folder, printed_by(finished.output))
    codes = {name: int(re.findall(r"^code (\d+)$", text, re.MULTILINE)[-1]) for name, text in made.printed.items()}
    assert codes == {name: int(name in refused) for name in jobs}, finished.output
    return made


def probed(jobs: Mapping[str, Words], folder: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment with which `probe.py` runs jobs."""
    first, *others = ([*map(str, words), "--output_dir", str(folder / name)] for name, words in jobs.items())
    return first, {"PROBE_OUT": str(folder), "PROBE_MORE": json.dumps(others)}


def printed_by(output: str) -> dict[str, str]:
    """What a launch printed, by job."""
    parts = re.split(r"^job (.*)$", output, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))
