"""Files that `accelerate config` itself writes, with the answers of a user; and what `check` makes of them.

Here are also the example of Accelerate's and Transformers' documentation, and the proof that a repaired file trains
the way it did before.
"""

from pathlib import Path
from unittest import mock

import pytest
import yaml
from accelerate.commands.config.config import get_user_input
from accelerate.commands.menu import BulletMenu

from accel_fsdp import linter
from accel_fsdp.wizard import MODEL

GPUS = {"Which type of machine": "4", "How many GPU": "2", "mixed precision": "2"}
LAYER = {"transformer layer class names": "LlamaDecoderLayer"}
INTERVIEWS: dict[str, dict[str, str]] = {
    "fsdp1": {**GPUS, **LAYER, "FullyShardedDataParallel": "yes", "your FSDP version": "0"},
    "fsdp1_shard_grad_op": {
        **GPUS, **LAYER, "FullyShardedDataParallel": "yes", "your FSDP version": "0",
        "sharding strategy": "1", "activation checkpointing": "yes",
        "offload parameters": "yes",
    },
    "fsdp2": {**GPUS, **LAYER, "FullyShardedDataParallel": "yes"},
    "fsdp2_model_decides": {**GPUS, "FullyShardedDataParallel": "yes", "_no_split_modules": "yes"},
    "fsdp2_mesh": {
        **GPUS, **LAYER, "FullyShardedDataParallel": "yes", "use the parallelism config": "yes",
        "FSDP shard size": "2",
    },
    "ddp": GPUS,
    "zero3": {**GPUS, "use DeepSpeed": "yes", "ZeRO optimization stage": "3"},
    "two machines": {
        **GPUS, "How many GPU": "4", "How many different machines": "2", "rank of this": "1",
        "IP address": "10.0.0.1", "What is the port": "29500", "same local network": "no",
        "rendezvous backend": "c10d",
    },
    "compiled": {**GPUS, "optimize your script": "yes", "customize the defaults": "yes"},
}  # fmt: skip


def asked(name: str, path: Path) -> None:
    """Writes the file of `accelerate config`, with the answers of INTERVIEWS and its own defaults for the rest."""
    answers, unused = INTERVIEWS[name], set(INTERVIEWS[name])

    def answer(question: str, otherwise: str) -> str:
        words = next((words for words in answers if words in question), "")
        unused.discard(words)
        return answers.get(words, otherwise)

    def choose(menu: BulletMenu, default_choice: int = 0) -> int:
        return int(answer(str(menu.prompt), str(default_choice)))

    with mock.patch.object(BulletMenu, "run", choose), mock.patch("builtins.input", lambda text: answer(text, "")):
        get_user_input().to_yaml_file(str(path))
    assert not unused


DOCUMENTATION_EXAMPLE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


FOUND = {"fsdp1_shard_grad_op": {("AF302", "fsdp_config.fsdp_reshard_after_forward")}}
"""What doesn't train as was answered; of all others the linter has nothing to say."""


def worth_acting_on(path: Path, options: linter.LintOptions) -> set[tuple[str, str]]:
    return {(finding.code, finding.key) for finding in linter.lint(path, options) if finding.severity != "note"}


@pytest.mark.parametrize("name", INTERVIEWS)
def test_a_file_of_accelerate_config(name: str, tmp_path: Path) -> None:
    """What was asked for and won't happen is found, and nothing else; the repair leaves nothing."""
    path = tmp_path / f"{name}.yaml"
    asked(name, path)
    assert worth_acting_on(path, linter.LintOptions(model=MODEL)) == FOUND.get(name, set())
    assert worth_acting_on(path, linter.LintOptions(model=MODEL, fix=True)) == set()
    repaired = yaml.safe_load(path.read_text())
    if name == "fsdp1_shard_grad_op":
        assert repaired["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"


def test_the_documentation_example(tmp_path: Path) -> None:
    """It names a retired key and no version. What Accelerate does with it stays the same after the repair.

    Its other keys have their defaults, as in every file of `accelerate config`.
    """
    path = tmp_path / "fsdp.yaml"
    path.write_text(DOCUMENTATION_EXAMPLE)
    severe = [finding for finding in linter.lint(path, linter.LintOptions()) if finding.severity != "note"]
    assert [(finding.code, finding.line) for finding in severe] == [("AF104", 4)]
    assert worth_acting_on(path, linter.LintOptions(fix=True)) == set()
    expected = yaml.safe_load(DOCUMENTATION_EXAMPLE.replace("_prefetch_policy", "_prefetch"))
    expected["fsdp_config"]["fsdp_version"] = 1
    assert yaml.safe_load(path.read_text()) == expected
