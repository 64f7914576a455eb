"""Rules about `parallelism_config`, the mesh of a job's ranks."""

import math
from collections.abc import Iterator

from accel_fsdp.config import BY_NAME, EXPERT_FLAG, ROW_AXES, Engine, mesh_fits, size_key, whole_mesh
from accel_fsdp.job import from_arguments
from accel_fsdp.linter.rules.engine import Finding, Subject, combined, rule
from accel_fsdp.models import Divisible

TENSOR = f"parallelism_config.{size_key('tp')}"


@rule("AF315", pains=("P41",))
def mesh_under_another_engine(subject: Subject) -> Iterator[Finding]:
    """A dimension in `parallelism_config` that the engine doesn't use.

    FSDP2 uses all but `sp`; DDP `dp_replicate` and `tp`; FSDP1 and TPU none. DeepSpeed uses `sp`, and beside it
    `dp_replicate` and `dp_shard` as the number of batches; without `sp` those two change nothing.
    """
    sizes = {name: size for name, size in subject.mesh.items() if type(size) is int}
    sequences = subject.engine is Engine.DEEPSPEED and sizes.get("sp", 1) != 1
    for name, size in sizes.items():
        key = size_key(name)
        field = BY_NAME["parallelism_config", key]
        counts = subject.engine is Engine.DEEPSPEED and name.startswith("dp_")
        if size == 1 or subject.engine in field.engines or (counts and sequences):
            continue
        yield Finding(
            f"parallelism_config.{key}",
            f"{subject.engine.label} does not use {key}",
            "DeepSpeed shards as zero_stage says" if counts else "Accelerate stops, or runs without it",
            f"{key}: 1; or "
            + ("distributed_type: DEEPSPEED" if field.engines == {Engine.DEEPSPEED} else _to_fsdp2(subject)),
            milder="warning" if counts else None,
        )


@rule("AF316", pains=("P42", "P103"))
def mesh_is_refused(subject: Subject) -> Iterator[Finding]:
    """A `parallelism_config` that Accelerate refuses.

    Sizes below 1; `cp` with `sp`; replicas beside `tp` or `cp` without shards; FSDP2 with neither shards nor `cp`; or a
    product that isn't `num_processes`. That stops DeepSpeed with `sp` too, whose batch then differs from Accelerate's.
    A mesh with all sizes 1 is ignored. With `tp` or experts, train/sft.py builds the mesh without Accelerate; its sizes
    must multiply to `num_processes` too, or divide it where `dp_shard` is 1: it then shards over all that remain.
    """
    engines, sizes = (Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED), subject.mesh
    are_integers = all(type(size) is int for size in sizes.values())
    if subject.engine not in engines or not subject.section("parallelism_config") or not are_integers:
        return
    small = next((name for name, size in sizes.items() if size < 1), "")
    total, processes = math.prod(sizes.values()), subject.number("num_processes")
    what, key = f"{small}_size is {sizes[small]}" if small else _refused_by_accelerate(subject), "parallelism_config"
    why, fix = f"{'train/sft.py' if subject.by_transformers else 'Accelerate'} stops: ValueError", _whole_mesh(subject)
    fits = total in (1, processes) or (subject.by_transformers and mesh_fits(sizes, processes))
    if processes and not what and not fits:
        largest = max((name for name in sizes if sizes[name] != 1), key=lambda name: sizes[name])
        product = " x ".join(f"{name}_size {size}" for name, size in sizes.items() if size != 1)
        what = f"parallelism_config has {total} ranks ({product}), num_processes is {processes}"
        why = why.replace("ValueError", "the sizes must multiply to it")
        if subject.engine is Engine.DEEPSPEED and sizes["sp"] != 1:
            why = "DeepSpeed stops: train_batch_size is not equal to micro batches times ranks"
        fix, key = f"{fix}; or num_processes: {total}", f"{key}.{size_key(largest)}"
    if what:
        yield Finding(key, what, why, fix)


def _refused_by_accelerate(subject: Subject) -> str:
    """Sizes that Accelerate refuses beside each other; empty if there are none, or if it doesn't see them."""
    sizes = subject.mesh
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        return "cp and sp exclude each other"
    if subject.by_transformers:
        return ""
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1 and (sizes["tp"] > 1 or sizes["cp"] > 1):
        return "replicas beside tp or cp need shards"
    unsharded = sizes["dp_shard"] == sizes["cp"] == 1 < sizes["dp_replicate"] * sizes["tp"]
    return "the mesh leaves FSDP nothing to shard over" if subject.engine is Engine.FSDP2 and unsharded else ""


def _whole_mesh(subject: Subject) -> str:
    """Sizes that can be used, as in a YAML; under DDP also those of FSDP2, which takes more axes."""
    sizes, engine = subject.mesh, subject.engine
    ranks = subject.number("num_processes") or max(math.prod(max(size, 1) for size in sizes.values()), 2)

    def words(engine: Engine) -> str:
        mesh = whole_mesh(sizes, ranks, engine, subject.by_transformers)
        return ", ".join(f"{axis}_size: {size}" for axis, size in mesh.items() if size != 1 or sizes[axis] != 1)

    if engine is Engine.DDP:
        return f"{words(engine)}; or {_to_fsdp2(subject)}, {words(Engine.FSDP2)}"
    return words(engine)


def _to_fsdp2(subject: Subject) -> str:
    return "fsdp_version: 2" if subject.engine is Engine.FSDP1 else "distributed_type: FSDP with fsdp_version: 2"


@rule("AF329")
def axes_of_another_engine(subject: Subject) -> Iterator[Finding]:
    """`tp` or `--expert_parallel_size` without FSDP2, beside `cp`, `sp`, fp16 or Liger's kernels: train/sft.py stops.

    transformers shards such a model itself, only with FSDP2, and has no axis for parts of a row, and no fp16. The loss
    of `--use_liger_kernel` takes the whole head.
    """
    if not subject.by_transformers:
        return
    if subject.arg_on("use_liger_kernel"):
        what, why = f"--use_liger_kernel with {_requested_axis(subject)}", "its loss takes the whole head"
        yield Finding("num_processes", what, f"train/sft.py stops: {why}", "leave it out")
    yield from combined(subject, "mixed_precision", "fp16-mesh")
    others = [axis for axis in ROW_AXES if subject.axes[axis] > 1]
    if subject.engine is not Engine.FSDP2:
        what = f"{_requested_axis(subject)} with {subject.engine.label}"
        yield Finding("distributed_type", what, "train/sft.py stops: it needs FSDP2", _to_fsdp2(subject))
    for axis in others if subject.engine is Engine.FSDP2 else ():
        what = f"{_requested_axis(subject)} beside {axis}_size: {subject.axes[axis]}"
        why = "train/sft.py stops: transformers has no axis for parts of a row"
        yield Finding(f"parallelism_config.{size_key(axis)}", what, why, f"{size_key(axis)}: 1")


def _requested_axis(subject: Subject) -> str:
    """The axis that makes transformers shard the model, as the user wrote it."""
    return f"tp_size: {subject.axes['tp']}" if subject.axes["tp"] > 1 else f"{EXPERT_FLAG} {subject.experts}"


@rule("AF333", "warning")
def keys_that_a_mesh_ignores(subject: Subject) -> Iterator[Finding]:
    """Keys of FSDP that have no effect with `tp` or `--expert_parallel_size`, where transformers shards the model.

    Its plans free the layers after forward, and shard all modules.
    """
    if not subject.by_transformers or subject.engine is not Engine.FSDP2:
        return
    if not subject.on("fsdp_reshard_after_forward") and subject.fsdp("fsdp_reshard_after_forward") is not None:
        why = "transformers' plan gathers layers again in backward: the memory and traffic of true"
        what = f"fsdp_reshard_after_forward: false has no effect with {_requested_axis(subject)}"
        yield Finding("fsdp_config.fsdp_reshard_after_forward", what, why, "fsdp_reshard_after_forward: true")
    if subject.fsdp("fsdp_ignored_modules"):
        what = f"fsdp_ignored_modules has no effect with {_requested_axis(subject)}"
        yield Finding("fsdp_config.fsdp_ignored_modules", what, "transformers shards all modules", "remove the key")


@rule("AF330")
def experts_do_not_fit_the_mesh(subject: Subject) -> Iterator[Finding]:
    """`--expert_parallel_size` that isn't a multiple of `tp_size`, or doesn't divide shards x `tp`.

    transformers' `DistributedConfig` refuses it.
    """
    layout = subject.job.layout
    if subject.by_transformers and subject.engine is Engine.FSDP2 and layout.ranks and layout.experts_misfit:
        fix = (subject.model or Divisible()).fix_of("ep", layout.sizes)
        yield Finding("num_processes", layout.experts_misfit, "train/sft.py stops, as transformers refuses it", fix)


@rule("AF516")
def sizes_that_do_not_divide(subject: Subject) -> Iterator[Finding]:
    """A model (`--model`) whose heads, key/value heads or experts aren't a multiple of `tp` or the experts' ranks.

    Attention stops in its first forward: "shape is invalid". transformers refuses experts: "Cannot evenly shard".
    """
    yield from _misfits(subject, "count", "loading or the first step stops")


@rule("AF517")
def model_without_a_plan(subject: Subject) -> Iterator[Finding]:
    """`tp`, or `--expert_parallel_size`, and a model (`--model`) whose layers or experts transformers can't divide."""
    if subject.by_transformers:
        yield from _misfits(subject, "plan", "train/sft.py stops")


@rule("AF518")
def tied_rows_are_padded(subject: Subject) -> Iterator[Finding]:
    """`tp` or experts with shards, and a model (`--model`) whose tied embedding has rows that don't divide evenly.

    torch pads the shards of the embedding, and with transformers 5.23 the head then keeps its initial weights.
    train/sft.py refuses it.
    """
    if subject.by_transformers:
        yield from _misfits(subject, "tie", "train/sft.py stops, as the head would keep its first weights")


@rule("AF519")
def weights_that_are_not_divided(subject: Subject) -> Iterator[Finding]:
    """`--load_in_4bit` with `tp` or `--expert_parallel_size`, or an adapter on divided weights, in train/sft.py.

    bitsandbytes' packed weights don't have the shape that the plan divides: its layer raises an AssertionError with
    `tp`, FSDP a RuntimeError with experts. PEFT 0.21 stops in the first step of an adapter on layers that `tp` splits,
    or on experts, which `--lora_target_modules` may name by their old layers, such as gate_proj (`--model`). Before
    2.13 torch can't write or read checkpoints of packed matrices, such as fused experts, that `tp` divides.
    """
    if subject.by_transformers:
        yield from _misfits(subject, "weights", "train/sft.py stops")


def _misfits(subject: Subject, kind: str, why: str) -> Iterator[Finding]:
    method = "qlora" if subject.arg_on("load_in_4bit", "load_in_8bit") else subject.job.method
    model, torch = subject.model or Divisible(), subject.versions.get("torch")
    targets = from_arguments.names_in(subject.arg("lora_target_modules"))
    for misfit in model.misfits(subject.job.layout.sizes, method, torch=torch, targets=targets):
        if misfit.kind == kind:
            yield Finding(TENSOR if misfit.axis == "tp" else "num_processes", misfit.what, why, misfit.fix)


@rule("AF637")
def rows_that_context_can_not_split(subject: Subject) -> Iterator[Finding]:
    """`cp` with `--packing`, with another attention than sdpa, or with a `--max_length` that isn't a multiple of 2 cp.

    Context parallelism has a single causal mask for the whole row, so packed documents attend to each other (TRL
    refuses them), and Trainer stops at other attention. torch divides other lengths into unequal or unbalanced parts.
    """
    size, length = subject.axes["cp"], from_arguments.positive_int(subject.arg("max_length"))
    if subject.engine is not Engine.FSDP2 or size == 1 or subject.args is None:
        return
    key = f"parallelism_config.{size_key('cp')}"
    if subject.arg_on("packing"):
        yield Finding(key, f"packed rows with cp_size: {size}", "they attend to each other", "drop --packing")
    if (attention := str(subject.arg("attn_implementation") or "sdpa")) != "sdpa":
        why = "Trainer stops: Context parallelism is supported only with SDPA attention"
        yield Finding(key, f"{attention} with cp_size: {size}", why, "--attn_implementation sdpa")
    if length % (2 * size):
        what = f"rows of {length} tokens with cp_size: {size}"
        fix = f"--max_length {length // (2 * size) * 2 * size or 2 * size}"
        yield Finding(key, what, "the ranks get unequal or unbalanced parts of a row", fix, milder="warning")
