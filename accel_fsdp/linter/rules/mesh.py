"""Rules about `parallelism_config`, the mesh of a job's ranks."""

import math
from collections.abc import Callable

from accel_fsdp.config import BY_NAME, EXPERT_FLAG, Engine, size_key
from accel_fsdp.job import ROW_AXES, from_arguments, mesh_fits, whole_mesh
from accel_fsdp.linter.rules.engine import Cases, Each, Row, combined
from accel_fsdp.linter.rules.subject import Subject
from accel_fsdp.models import Divisible

SECTION = "parallelism_config"
TENSOR, CONTEXT = (f"{SECTION}.{size_key(axis)}" for axis in ("tp", "cp"))
RESHARD = "fsdp_reshard_after_forward"


def _unused_axes(subject: Subject) -> Each:
    """FSDP2 uses all but sp; DDP dp_replicate and tp; FSDP1 and TPU none; DeepSpeed sp, and beside it dp as batches."""
    sizes = {name: size for name, size in subject.mesh.items() if type(size) is int}
    sequences = subject.engine is Engine.DEEPSPEED and sizes.get("sp", 1) != 1
    for name, size in sizes.items():
        key = size_key(name)
        engines = BY_NAME[SECTION, key].engines
        counts = subject.engine is Engine.DEEPSPEED and name.startswith("dp_")
        if size == 1 or subject.engine in engines or (counts and sequences):
            continue
        yield {
            "key": key,
            "engine": subject.engine.label,
            "why": "DeepSpeed shards as zero_stage says" if counts else "Accelerate stops, or runs without it",
            "other": "distributed_type: DEEPSPEED" if engines == {Engine.DEEPSPEED} else _to_fsdp2(subject),
            "severity": "warning" if counts else None,
        }


def _refused_mesh(subject: Subject) -> Cases:
    """Train/sft.py builds a mesh with tp or experts without Accelerate; where dp_shard is 1, it takes what remains."""
    engines, sizes = (Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED), subject.mesh
    are_integers = all(type(size) is int for size in sizes.values())
    if subject.engine not in engines or not subject.section(SECTION) or not are_integers:
        return None
    small = next((name for name, size in sizes.items() if size < 1), "")
    total, processes = math.prod(sizes.values()), subject.number("num_processes")
    what, key = f"{small}_size is {sizes[small]}" if small else _refused_by_accelerate(subject), SECTION
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
    return {"key": key, "what": what, "why": why, "fix": fix} if what else None


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


def _axis(subject: Subject) -> dict[str, str]:
    """The axis that makes transformers shard the model, as the user wrote it."""
    axis = f"tp_size: {subject.axes['tp']}" if subject.axes["tp"] > 1 else f"{EXPERT_FLAG} {subject.experts}"
    return {"axis": axis}


def _by_transformers(when: Callable[[Subject], bool]) -> Callable[[Subject], Cases]:
    """The case of a job that train/sft.py has transformers shard."""
    return lambda subject: _axis(subject) if subject.by_transformers and when(subject) else None


def _without_fsdp2(subject: Subject) -> Cases:
    if not subject.by_transformers or subject.engine is Engine.FSDP2:
        return None
    return {**_axis(subject), "engine": subject.engine.label, "fix": _to_fsdp2(subject)}


def _parts_of_rows(subject: Subject) -> Each:
    is_sharded = subject.by_transformers and subject.engine is Engine.FSDP2
    for axis in (axis for axis in ROW_AXES if is_sharded and subject.axes[axis] > 1):
        yield {**_axis(subject), "other": f"{axis}_size: {subject.axes[axis]}", "key": size_key(axis)}


def _keeps_layers(subject: Subject) -> bool:
    is_off = not subject.on(RESHARD) and subject.fsdp(RESHARD) is not None
    return subject.engine is Engine.FSDP2 and is_off


def _experts(subject: Subject) -> Cases:
    layout = subject.job.layout
    is_sharded = subject.by_transformers and subject.engine is Engine.FSDP2 and layout.ranks
    if not is_sharded or not layout.experts_misfit:
        return None
    return {"misfit": layout.experts_misfit, "fix": (subject.model or Divisible()).fix_of("ep", layout.sizes)}


def _misfits(kind: str, ours: bool = True) -> Callable[[Subject], Cases]:
    """What of a model doesn't fit the mesh; `ours`: only where train/sft.py has transformers shard it."""

    def when(subject: Subject) -> Cases:
        method = "qlora" if subject.arg_on("load_in_4bit", "load_in_8bit") else subject.job.method
        model, torch = subject.model or Divisible(), subject.versions.get("torch")
        targets = from_arguments.names_in(subject.arg("lora_target_modules"))
        if ours and not subject.by_transformers:
            return []
        return [
            {"key": TENSOR if misfit.axis == "tp" else "num_processes", "misfit": misfit.what, "fix": misfit.fix}
            for misfit in model.misfits(subject.job.layout.sizes, method, torch=torch, targets=targets)
            if misfit.kind == kind
        ]

    return when


def _context(subject: Subject) -> int:
    """The ranks that share a row under FSDP2, if the arguments are known; else 1."""
    return subject.axes["cp"] if subject.engine is Engine.FSDP2 and subject.args is not None else 1


def _other_attention(subject: Subject) -> Cases:
    attention, size = str(subject.arg("attn_implementation") or "sdpa"), _context(subject)
    return {"attention": attention, "size": size} if size > 1 and attention != "sdpa" else None


def _uneven_rows(subject: Subject) -> Cases:
    size, length = _context(subject), from_arguments.positive_int(subject.arg("max_length"))
    even = length // (2 * size) * 2 * size or 2 * size
    return {"size": size, "length": length, "even": even} if size != 1 and length % (2 * size) else None


ROWS = (
    Row(
        "AF315", "error", f"{SECTION}.{{key}}", "{engine} does not use {key}", "{why}", "{key}: 1; or {other}",
        _unused_axes, seen="P41 launcher plugin",
    ),
    Row(
        "AF316", "error", "{key}", "{what}", "{why}", "{fix}", _refused_mesh, seen="P42 P103 plugin ranks",
        about="a size below 1; cp with sp; replicas beside tp or cp without shards; nothing for FSDP to shard over; "
        "or a product that isn't num_processes",
    ),
    Row(
        "AF329", "error", "num_processes", "--use_liger_kernel with {axis}",
        "train/sft.py stops: its loss takes the whole head", "leave it out",
        _by_transformers(lambda s: s.arg_on("use_liger_kernel")), seen="transformers.DistributedConfig",
    ),
    combined("AF329", "error", "mixed_precision", "fp16-mesh", seen="", only=lambda s: s.by_transformers),
    Row(
        "AF329", "error", "distributed_type", "{axis} with {engine}", "train/sft.py stops: it needs FSDP2", "{fix}",
        _without_fsdp2,
    ),
    Row(
        "AF329", "error", f"{SECTION}.{{key}}", "{axis} beside {other}",
        "train/sft.py stops: transformers has no axis for parts of a row", "{key}: 1", _parts_of_rows,
    ),
    Row(
        "AF330", "error", "num_processes", "{misfit}", "train/sft.py stops, as transformers refuses it", "{fix}",
        _experts,
        seen="transformers.DistributedConfig",
        about=f"{EXPERT_FLAG} that isn't a multiple of tp_size, or doesn't divide shards x tp",
    ),
    Row(
        "AF333", "warning", f"fsdp_config.{RESHARD}", f"{RESHARD}: false has no effect with {{axis}}",
        "transformers' plan gathers layers again in backward: the memory and traffic of true", f"{RESHARD}: true",
        _by_transformers(_keeps_layers), seen="transformers.DistributedConfig",
    ),
    Row(
        "AF333", "warning", "fsdp_config.fsdp_ignored_modules", "fsdp_ignored_modules has no effect with {axis}",
        "transformers shards all modules", "remove the key",
        _by_transformers(lambda s: s.engine is Engine.FSDP2 and bool(s.fsdp("fsdp_ignored_modules"))),
    ),
    Row(
        "AF516", "error", "{key}", "{misfit}", "loading or the first step stops", "{fix}",
        _misfits("count", ours=False),
        seen="transformers ranks", about="heads, key/value heads or experts that the mesh doesn't divide",
    ),
    Row(
        "AF517", "error", "{key}", "{misfit}", "train/sft.py stops", "{fix}", _misfits("plan"), seen="transformers",
        about="layers or experts that transformers has no plan to divide",
    ),
    Row(
        "AF518", "error", "{key}", "{misfit}", "train/sft.py stops, as the head would keep its first weights", "{fix}",
        _misfits("tie"), seen="transformers ranks",
        about="a tied embedding whose rows don't divide evenly over the shards",
    ),
    Row(
        "AF519", "error", "{key}", "{misfit}", "train/sft.py stops", "{fix}", _misfits("weights"),
        seen="transformers peft ranks",
        about="4-bit weights, adapters or packed matrices that can't be divided by tp or experts",
    ),
    Row(
        "AF637", "error", CONTEXT, "packed rows with cp_size: {size}", "they attend to each other", "drop --packing",
        lambda s: {"size": _context(s)} if _context(s) != 1 and s.arg_on("packing") else None, seen="trl#6843",
    ),
    Row(
        "AF637", "error", CONTEXT, "{attention} with cp_size: {size}",
        "Trainer stops: Context parallelism is supported only with SDPA attention", "--attn_implementation sdpa",
        _other_attention, seen="transformers.Trainer",
    ),
    Row(
        "AF637", "warning", CONTEXT, "rows of {length} tokens with cp_size: {size}",
        "the ranks get unequal or unbalanced parts of a row", "--max_length {even}", _uneven_rows,
    ),
)  # fmt: skip
