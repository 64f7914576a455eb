"""One setting of `gpu.py`, measured: `python gpu_case.py CASE DEVICE`, as rank 0 of as many ranks as the case has.

The other ranks don't exist: torch's fake process group lets collectives allocate and sends nothing. Everything else is
real: Accelerate prepares the model, and three steps are trained on random tokens. Prints `MEASURED {...}`: bytes at the
highest point of forward with loss, backward and optimizer step, and between steps.
"""

import functools
import gc
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

STEPS = 3
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WORKSPACE_OPERAND = 512


class CudaMeter:
    """The statistics of CUDA's caching allocator."""

    def begin(self, model: Any, optimizer: Any, batch: dict[str, Tensor]) -> None:
        """Nothing is left over from before."""
        gc.collect()
        torch.cuda.empty_cache()

    def reset(self) -> None:
        """A new highest point begins."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def alive(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Bytes allocated at most."""
        return torch.cuda.max_memory_allocated()

    def more(self) -> dict[str, int]:
        """Bytes at most that were reserved, and that were not yet free for reuse."""
        stats = torch.cuda.memory_stats()
        return {"reserved": stats["reserved_bytes.all.peak"], "active": stats["active_bytes.all.peak"]}


class CpuMeter:
    """What torch's profiler sees of the CPU's allocator: for trying this program without a GPU."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._alive = self._peak = 0

    def begin(self, model: Any, optimizer: Any, batch: dict[str, Tensor]) -> None:
        """Counts what there is."""
        given: list[Any] = [*model.parameters(), *model.buffers(), *batch.values()]
        storages = [
            (argument.to_local() if hasattr(argument, "to_local") else argument).untyped_storage() for argument in given
        ]
        self._alive = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        gc.collect()

    def reset(self) -> None:
        """A new highest point begins."""
        self._stop()
        self._peak = self._alive
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.start()

    def alive(self) -> int:
        """Bytes that exist now."""
        self._stop()
        return self._alive

    def peak(self) -> int:
        """Bytes that existed at most."""
        self._stop()
        return self._peak

    def more(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def _stop(self) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            self._alive += event.nbytes()
            self._peak = max(self._peak, self._alive)
        self._profile = None


def main() -> None:
    """Measures one case."""
    case, device = json.loads(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    results: dict[str, Any] = {"workspace": workspace() if device == "cuda" else 0}
    join(case["engine"], case["ranks"], device)
    accelerator = accelerator_of(case, device)
    model, optimizer = prepared(accelerator, case, device)
    batch = batch_of(case, device, model.config.vocab_size if hasattr(model, "config") else case["vocab"])
    meter = CudaMeter() if device == "cuda" else CpuMeter()
    meter.begin(model, optimizer, batch)
    steps = [step(accelerator, model, optimizer, batch, meter) for _ in range(STEPS)]
    results |= {**steps[1], "third_peak": steps[2]["peak"]}
    results["versions"] = {module.__name__: module.__version__ for module in (torch, transformers)}
    results["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    results["hopper"] = device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    print("MEASURED " + json.dumps(results), flush=True)
    os._exit(0)  # no teardown of a process group that has no other ranks


def workspace() -> int:
    """What cuBLAS keeps after a first product in forward and backward, which run in threads of their own."""
    operand = torch.randn(WORKSPACE_OPERAND, WORKSPACE_OPERAND, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (operand @ operand).sum().backward()  # type: ignore[no-untyped-call]
    del operand
    gc.collect()
    return torch.cuda.memory_allocated()


def join(engine: str, ranks: int, device: str) -> None:
    """Becomes rank 0 of a job whose other ranks are made up; a single process stays alone.

    DDP's reducer takes no made-up results (torch 2.11), but keeps the same buckets for any number of ranks: it is the
    only rank of a real group.
    """
    if ranks == 0:
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    is_alone = engine == "ddp"
    backend = "fake" if not is_alone else "nccl" if device == "cuda" else "gloo"
    world = 1 if is_alone else ranks
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ["MASTER_ADDR"] = "localhost"
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, store=dist.HashStore() if is_alone else FakeStore(), rank=0, world_size=world)


def accelerator_of(case: dict[str, Any], device: str) -> Any:
    """Accelerate's entry, set up as the YAML of `accel-fsdp config` sets it up."""
    if device == "cpu" and case["engine"].startswith("fsdp"):
        from accel_fsdp.ranks import cpu

        os.environ["ACCELERATE_USE_FSDP"] = "true"
        cpu.enable()
    from accelerate import Accelerator

    plugin = fsdp_plugin(case) if case["engine"].startswith("fsdp") else None
    alone = device == "cpu" and plugin is None
    return Accelerator(mixed_precision=case["precision"], fsdp_plugin=plugin, cpu=alone)


def fsdp_plugin(case: dict[str, Any]) -> Any:
    """The settings of FSDP."""
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    common: dict[str, Any] = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": case["blocks"],
        "cpu_ram_efficient_loading": False,
        "activation_checkpointing": case["checkpointing"] == "full",
    }
    if case["engine"] == "fsdp2":
        return FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=case["strategy"] in (1, 4), **common
        )
    return FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy=ShardingStrategy(case["strategy"]),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=True,
        sync_module_states=False,
        **common,
    )


def prepared(accelerator: Any, case: dict[str, Any], device: str) -> tuple[Any, Any]:
    """Model and optimizer, made and prepared in the order in which Trainer does."""
    model = built(case, device)
    if case["method"] == "lora":
        model = with_adapters(accelerator, model, case)
    fsdp = case["engine"].startswith("fsdp")
    if case["checkpointing"] == "reentrant" or (case["checkpointing"] == "full" and not fsdp):
        options = {"use_reentrant": case["checkpointing"] == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if case["method"] == "lora":
            model.enable_input_require_grads()
    model.train()
    if case["engine"] == "fsdp1":
        model = accelerator.prepare(model)
        optimizer: Any = accelerator.prepare(optimizer_of(case, model))
    else:
        model, optimizer = accelerator.prepare(model, optimizer_of(case, model))
    return model, optimizer


def built(case: dict[str, Any], device: str) -> Any:
    """The model with random weights, made on the device."""
    options = dict(case["config"])
    config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    config.use_cache = False
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=PRECISIONS[case["dtype"]],
            attn_implementation=case["attention"],
            trust_remote_code=False,
        )


def with_adapters(accelerator: Any, model: Any, case: dict[str, Any]) -> Any:
    """PEFT's LoRA; under FSDP1 with PEFT's wrapping policy, and without a cast that changes what is recomputed."""
    from peft import LoraConfig, get_peft_model
    from peft.utils.other import fsdp_auto_wrap_policy

    from accel_fsdp.training import patches

    model = get_peft_model(model, LoraConfig(r=case["lora_rank"], target_modules="all-linear"))
    if case["engine"] == "fsdp1":
        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(case["blocks"])
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
        patches.leave_casts_to_autocast(model)
    return model


def optimizer_of(case: dict[str, Any], model: Any) -> torch.optim.Optimizer:
    """AdamW as Trainer makes it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = case["optimizer"] == "adamw_torch_fused"
    return torch.optim.AdamW(trained, lr=1e-5, fused=fused or None, foreach=None if fused else True)


def batch_of(case: dict[str, Any], device: str, vocab: int) -> dict[str, Tensor]:
    """Random tokens in rows of one length."""
    ids = torch.randint(vocab, (case["rows"], case["length"]), device=device)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def step(accelerator: Any, model: Any, optimizer: Any, batch: dict[str, Tensor], meter: Any) -> dict[str, int]:
    """One training step as Trainer makes it, its phases apart."""
    meter.reset()
    optimizer.zero_grad()
    results = {"steady": meter.alive()}
    peaks: list[int] = []

    def phase(name: str, run: Callable[[], Any]) -> Any:
        meter.reset()
        result = run()
        peaks.append(meter.peak())
        results[name] = peaks[-1]
        return result

    count = batch["labels"].numel()
    tokens = torch.tensor(count, device=batch["labels"].device)
    most: dict[str, int] = {}
    loss = phase("forward", lambda: model(**batch, num_items_in_batch=tokens).loss)
    most = larger(most, meter.more())
    phase("backward", functools.partial(accelerator.backward, loss))
    most = larger(most, meter.more())
    del loss
    phase("step", optimizer.step)
    most = larger(most, meter.more())
    return results | most | {"peak": max(peaks)}


def larger(first: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """The larger value of each."""
    names: Iterable[str] = first.keys() | other.keys()
    return {name: max(first.get(name, 0), other.get(name, 0)) for name in names}


if __name__ == "__main__":
    main()
