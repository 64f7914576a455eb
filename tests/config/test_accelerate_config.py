"""Files that `accelerate config` itself writes, asked in a terminal as a user would be; and what `check` makes of them.

Here are also the example of Accelerate's and Transformers' documentation, and the proof that a repaired file trains
the way it did before.
"""

import sys
from pathlib import Path

import pexpect
import pytest
import yaml

from accel_fsdp import linter
from accel_fsdp.wizard import MODEL

ENTER = "\r"
MENU, FIELD = r"selecting with enter\r\n", r"(?:\[\w[\w/]*\] ?: ?|\.\.\.\? : |process\? |', ...\): )$"
GPUS = {"Which type of machine": "4" + ENTER, "How many GPU": "2" + ENTER, "mixed precision": "2" + ENTER}
LAYER = {"transformer layer class names": "LlamaDecoderLayer" + ENTER}
INTERVIEWS: dict[str, dict[str, str]] = {
    "fsdp1": {**GPUS, **LAYER, "FullyShardedDataParallel": "yes" + ENTER, "your FSDP version": "0" + ENTER},
    "fsdp1_shard_grad_op": {
        **GPUS, **LAYER, "FullyShardedDataParallel": "yes" + ENTER, "your FSDP version": "0" + ENTER,
        "sharding strategy": "1" + ENTER, "activation checkpointing": "yes" + ENTER,
        "offload parameters": "yes" + ENTER,
    },
    "fsdp2": {**GPUS, **LAYER, "FullyShardedDataParallel": "yes" + ENTER},
    "fsdp2_model_decides": {**GPUS, "FullyShardedDataParallel": "yes" + ENTER, "_no_split_modules": "yes" + ENTER},
    "fsdp2_mesh": {
        **GPUS, **LAYER, "FullyShardedDataParallel": "yes" + ENTER, "use the parallelism config": "yes" + ENTER,
        "FSDP shard size": "2" + ENTER,
    },
    "ddp": GPUS,
    "zero3": {**GPUS, "use DeepSpeed": "yes" + ENTER, "ZeRO optimization stage": "3" + ENTER},
    "two machines": {
        **GPUS, "How many GPU": "4" + ENTER, "How many different machines": "2" + ENTER, "rank of this": "1" + ENTER,
        "IP address": "10.0.0.1" + ENTER, "What is the port": "29500" + ENTER, "same local network": "no" + ENTER,
        "rendezvous backend": "c10d" + ENTER,
    },
    "compiled": {**GPUS, "optimize your script": "yes" + ENTER, "customize the defaults": "yes" + ENTER},
}  # fmt: skip


ASKING = """
import sys
from accelerate.commands.accelerate_cli import main
for path in sys.argv[1:]:
    sys.argv = ["accelerate", "config", "--config_file", path]
    main()
    print("WRITTEN", flush=True)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `accelerate config` wrote in INTERVIEWS: one process, as it takes seconds to start."""
    folder = tmp_path_factory.mktemp("asked")
    command = ["-c", ASKING, *(str(folder / f"{name}.yaml") for name in INTERVIEWS)]
    child = pexpect.spawn(sys.executable, command, encoding="utf-8", timeout=60, dimensions=(40, 250))
    try:
        for name, answers in INTERVIEWS.items():
            answer_accelerate(child, answers)
            assert (folder / f"{name}.yaml").is_file(), child.before
    finally:
        child.close(force=True)
    return folder


def answer_accelerate(child: pexpect.spawn, answers: dict[str, str]) -> None:
    """Gives `answers` where their words are asked for, and Enter everywhere else, until the file is written."""
    unused = set(answers)
    while child.expect([MENU, FIELD, "WRITTEN\r\n"]) != 2:
        question = child.before + child.after
        answered = [words for words in answers if words in question]
        unused -= set(answered)
        child.send(answers[answered[0]] if answered else ENTER)
    assert not unused, child.before


DOCUMENTATION_EXAMPLE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
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
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


FOUND = {"fsdp1_shard_grad_op": {("AF302", "fsdp_config.fsdp_reshard_after_forward")}}
"""What doesn't train as was answered; of all others the linter has nothing to say."""


def worth_acting_on(path: Path, options: linter.LintOptions) -> set[tuple[str, str]]:
    return {(finding.code, finding.key) for finding in linter.lint(path, options) if finding.severity != "note"}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", INTERVIEWS)
def test_a_file_of_accelerate_config(name: str, asked: Path) -> None:
    """What was asked for and won't happen is found, and nothing else; the repair leaves nothing."""
    path = asked / f"{name}.yaml"
    assert worth_acting_on(path, linter.LintOptions(model=MODEL)) == FOUND.get(name, set())
    assert worth_acting_on(path, linter.LintOptions(model=MODEL, fix=True)) == set()
    repaired = yaml.safe_load(path.read_text())
    if name == "fsdp1_shard_grad_op":
        assert repaired["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"


def test_the_documentation_example(tmp_path: Path) -> None:
    """It names a retired key and no version. What Accelerate does with it stays the same after the repair."""
    path = tmp_path / "fsdp.yaml"
    path.write_text(DOCUMENTATION_EXAMPLE)
    findings = {
        (finding.code, finding.line)
        for finding in linter.lint(path, linter.LintOptions())
        if finding.severity != "note"
    }
    assert findings == {("AF104", 7)}
    assert worth_acting_on(path, linter.LintOptions(fix=True)) == set()
    repaired = yaml.safe_load(path.read_text())["fsdp_config"]
    assert repaired.pop("fsdp_version") == 1
    assert repaired.pop("fsdp_backward_prefetch") == "BACKWARD_PRE"
    original = yaml.safe_load(DOCUMENTATION_EXAMPLE)["fsdp_config"]
    del original["fsdp_backward_prefetch_policy"]
    assert repaired == original
