"""Faults of libraries that train something else in silence: a rehearsal of a script that has one finds it."""

from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_mistakes import DOCS, FSDP1, FSDP2, in_docs, yaml_file
from test_public import rehearsed

SCRIPT = ROOT / "tests/rehearsal/faults.py"
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a loss that counts two ranks with the same rows": ("loss of two ranks", FSDP2, "the script"),
    "adapters after sharding": ("adapters after sharding", FSDP2, "the script"),
    "adapters apart": ("adapters apart", {}, "the script"),
    "a norm reduced too often": ("norm reduced too often", FSDP2, "the script"),
    "moments that FSDP1 forgets in a resume": ("forgotten moments", FSDP1, "fsdp_state_dict_type"),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_library_is_found(name: str, tiny_model: Path, tmp_path: Path) -> None:
    fault, fsdp, key = FAULTS[name]
    step = rehearsed(yaml_file(tmp_path, fsdp), SCRIPT, fault, tiny_model, tmp_path / "runs")
    assert (step["passed"], step["key"]) == (False, key), step
    assert name in DOCS
    assert in_docs(step["said"]), step["said"]
