"""What transformers does today with meshes that don't fit a model: the reasons for rules. Red means: fixed upstream."""

import json
import sys

import pytest
from conftest import ROOT, run
from upstream_mesh import CASES

from accel_fsdp.models import model_facts

REFUSED = {
    "heads": ("AF516", "is invalid for input of size"),
    "key/value heads": ("AF516", "is invalid for input of size"),
    "experts": ("AF516", "Cannot evenly shard 5 experts"),
    "no tensor plan": ("AF517", "has no `tp_plan`"),
    "no expert plan": ("AF517", "has no `ep_plan`"),
    "4 bits": ("AF519", "AssertionError"),
    "4 bits in shards": ("AF519", "exceeds dimension size"),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = run([*words, ROOT / "tests" / "upstream_mesh.py", tmp_path_factory.mktemp("mesh")])
    assert finished.code == 0, finished.output[-5000:]
    lines = [line.partition("SEEN ")[2] for line in finished.output.splitlines() if "SEEN [" in line]
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rule_says_stops(name: str, seen: dict[str, str]) -> None:
    assert REFUSED[name][1] in seen[name]


def test_what_no_rule_says_runs(seen: dict[str, str]) -> None:
    assert (seen["even"], seen["whole attention"]) == ("DTensor", "")
    assert seen["whole attention, others divided"] == "DTensor"


def test_a_model_without_a_plan_of_its_own_is_not_divided(seen: dict[str, str]) -> None:
    """AF517: gpt-oss has one for its experts; with `tp` its head alone is divided, and each rank holds all layers."""
    assert seen["head alone"] == "Parameter"


def test_the_facts_say_so_before() -> None:
    facts = {name: model_facts("a", config) for name, (config, _, _) in CASES.items()}
    assert (facts["heads"].heads, facts["key/value heads"].kv_heads, facts["whole attention"].heads) == (3, 3, 0)
    assert (facts["experts"].experts, facts["experts"].fused_experts) == (5, 5 * 3 * 48 * 32)
    assert [name for name, fact in facts.items() if not fact.tensor_plan] == ["no tensor plan", "head alone"]
    assert [name for name, fact in facts.items() if fact.expert_plan] == ["experts", "head alone"]
    assert [name for name, fact in facts.items() if fact.replicated_norms] == ["experts"]
