"""Each patch is needed: without it the library shows its fault, and none that mends it is older than `until`."""

import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest
from conftest import run
from packaging.version import Version
from test_architecture import MODULES, PATCHING

from accel_fsdp.errors import TESTED
from accel_fsdp.library_internals import Patch

pytestmark = pytest.mark.oldest
PATCHES = {
    name: patch
    for module in sorted(PATCHING)
    if "@patch(" in MODULES[module].read_text()
    for name, patch in vars(import_module(f"accel_fsdp.{module}")).items()
    if isinstance(patch, Patch)
}
BEGIN = """
import os, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from accel_fsdp.ranks import cpu
from accel_fsdp.training import patches

os.environ.update(RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1", CUDA_VISIBLE_DEVICES="")
NAME = os.environ["PROBE_WITHOUT"]
os.chdir(os.path.dirname(os.path.abspath(__file__)))

def group(backend, ranks):
    os.environ["WORLD_SIZE"] = str(ranks)
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=ranks)

def mend():
    for module in (cpu, patches):
        for name, patch in vars(module).items():
            if type(patch).__name__ == "Patch" and name != NAME:
                patch()

def adapted():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=32)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    return get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))

def wrapped(model):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    return FSDP(model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}))

def refuses(act):
    try:
        act()
    except (ValueError, RuntimeError, AssertionError, KeyError, AttributeError):
        return True
    return False

mend()
"""
FAULTS = {
    "choose_gloo": """
from accelerate import Accelerator
group("gloo", 1)
fault = "FSDP" not in str(Accelerator().distributed_type)
""",
    "let_plugin_sync": """
from accelerate.utils import FullyShardedDataParallelPlugin
fault = refuses(lambda: FullyShardedDataParallelPlugin(fsdp_version=1, sync_module_states=True))
""",
    "default_to_cpu": """
group("fake", 4)
fault = refuses(lambda: FSDP(nn.Linear(8, 8)))
""",
    "shard_within_machines": """
group("fake", 4)
how = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
fault = FSDP(nn.Sequential(nn.Linear(8, 8)), **how).process_group.size() == 1
""",
    "sync_cpu_tensors": """
group("fake", 4)
fault = refuses(lambda: FSDP(nn.Linear(8, 8), sync_module_states=True))
""",
    "keep_full_state": """
group("fake", 4)
model = FSDP(nn.Linear(8, 8), use_orig_params=True)
FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True))
fault = model.state_dict()["weight"].sum().item() is None
""",
    "copy_full_optimizer_state": """
group("fake", 4)
model = FSDP(nn.Linear(8, 8, bias=False), use_orig_params=True)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
both = FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(offload_to_cpu=True)
FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *both)
state = FSDP.optim_state_dict(model, optimizer)["state"]["weight"]
fault = state["exp_avg"].untyped_storage().data_ptr() == state["exp_avg_sq"].untyped_storage().data_ptr()
""",
    "sum_new_gradients": """
from types import SimpleNamespace
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce
dist.all_reduce = lambda tensor, group=None: tensor.mul_(2)  # as where another rank has the same gradient
norm = nn.RMSNorm(4)
ReplicatedWithGradAllReduce().install_forward(norm, SimpleNamespace(get_group=lambda: None))
for _ in range(2):
    norm(torch.ones(1, 4, requires_grad=True)).sum().backward()
fault = norm.weight.grad[0].item() > 5
""",
    "allow_bf16": """
from transformers import TrainingArguments
fault = refuses(lambda: TrainingArguments(bf16=True))
""",
    "save_wrapped_adapters": """
from peft import get_peft_model_state_dict
group("gloo", 1)
model = wrapped(adapted())
FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
fault = not get_peft_model_state_dict(model.module, state_dict=model.state_dict())
""",
    "load_through_fsdp1": """
import peft
group("gloo", 1)
model = adapted()
saved = {name: value + 1 for name, value in peft.get_peft_model_state_dict(model).items()}
model = wrapped(model)
FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
before = {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}
fault = refuses(lambda: peft.set_peft_model_state_dict(model, saved)) or all(
    torch.equal(value, before[name]) for name, value in model.state_dict().items() if "lora" in name
)
""",
    "read_metadata_as_data": """
import pickle
from torch.distributed.checkpoint import FileSystemReader
class Evil:
    def __reduce__(self):
        return os.mkdir, ("proof",)
with open(".metadata", "wb") as file:
    pickle.dump(Evil(), file)
try:
    FileSystemReader(".").read_metadata()
except Exception as error:
    print(error)
fault = os.path.exists("proof")
""",
    "read_values_as_data": """
import torch.distributed.checkpoint as dcp
class Evil:
    def __reduce__(self):
        return os.mkdir, ("proof",)
dcp.save({"rate": Evil()}, checkpoint_id="saved", no_dist=True)
try:
    dcp.load({"rate": 1.0}, checkpoint_id="saved", no_dist=True)
except BaseException as error:
    print(error)
fault = os.path.exists("proof")
""",
    "keep_frozen_units": """
group("gloo", 1)
model = wrapped(adapted())
model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
fault = refuses(model.state_dict)
""",
}


def has_fault(name: str, script: Path) -> bool:
    """Whether the installed library shows it without the patch, with all others: an answer, or an end by a signal."""
    script.write_text(f"{BEGIN}{FAULTS[name]}\nprint('FAULT', fault, flush=True)\nos._exit(0)\n")
    # a training in this process may have made torch load weights alone
    done = run([sys.executable, script], PROBE_WITHOUT=name, TORCH_FORCE_WEIGHTS_ONLY_LOAD="0")
    assert done.code < 0 or "FAULT True" in done.output or "FAULT False" in done.output, done.output
    print(done.output)  # which pytest shows beside a wrong answer
    return "FAULT False" not in done.output


@pytest.mark.parametrize("name", PATCHES)
def test_the_library_has_the_fault_as_long_as_the_patch_says(name: str, tmp_path: Path) -> None:
    patch = PATCHES[name]
    installed = f"{patch.library} {metadata.version(patch.library)}"
    message = f"{installed} {'needs' if patch.is_needed else 'does not need'} {name}, by its until={patch.until!r}"
    assert has_fault(name, tmp_path / "probe.py") == patch.is_needed, message


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_that_no_tested_version_needs_goes(name: str) -> None:
    patch = PATCHES[name]
    assert not patch.until or Version(patch.until) > Version(TESTED[patch.library][0])


def test_every_patch_is_tried() -> None:
    assert set(FAULTS) == set(PATCHES)
