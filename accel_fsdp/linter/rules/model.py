"""Rules about the model (`--model`) and its number formats."""

from accel_fsdp.config import LOW_DTYPES, TORCH_DTYPES, Edit, Engine
from accel_fsdp.errors import did_you_mean
from accel_fsdp.job import UNLESS_SFT, clashes
from accel_fsdp.linter.rules.engine import Cases, Each, Row, combined
from accel_fsdp.linter.rules.fsdp import POLICY, VERSION
from accel_fsdp.linter.rules.subject import Subject

NAMES = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
RAM_LOADING = "fsdp_config.fsdp_cpu_ram_efficient_loading"
NOT_FOUND = "Accelerate stops: Could not find the transformer layer class"


def _classes(subject: Subject) -> str:
    """The model's layer classes, as the file names them."""
    return ",".join(layer.name for layer in subject.model.wrap_classes) if subject.model else ""


def _absent_class(subject: Subject) -> Cases:
    model, classes = subject.model, _classes(subject)
    if model is None or not subject.is_fsdp:
        return None
    edits = (Edit("fsdp_config", "fsdp_transformer_layer_cls_to_wrap", classes),) if classes else ()
    return [
        {"model": model.name, "name": name, "hint": did_you_mean(name, model.classes), "classes": classes or "NAME"}
        | {"edits": edits}
        for name in subject.layer_classes
        if name not in model.classes
    ]


def _declared(subject: Subject, some: bool) -> Cases:
    """The model's own `_no_split_modules`, used where the file names no class: `some` are absent, or there are none."""
    model, takes_declared = subject.model, not subject.has("fsdp_transformer_layer_cls_to_wrap")
    wraps = subject.is_fsdp and subject.wrap_policy == "TRANSFORMER_BASED_WRAP"
    if not (model and wraps and takes_declared) or model.declared_classes is None:
        return None
    absent = sorted(name for name in model.declared_classes if name not in model.classes)
    words = {"model": model.name, "names": ", ".join(absent), "classes": _classes(subject) or "NAME"}
    return words if (absent if some else not model.declared_classes) else None


def _embedding_units(subject: Subject) -> bool:
    """Accelerate 1.14 or later makes units of embedding and head; PyTorch before 2.13 accepts shared ones."""
    is_accepted = subject.job.embeddings == "shared" and subject.older("torch", "2.13")
    return not subject.older("accelerate", "1.14") and not is_accepted


def _holds_embedding(subject: Subject) -> Each:
    model = subject.model
    wraps = subject.engine is Engine.FSDP2 and subject.wrap_policy == "TRANSFORMER_BASED_WRAP"
    if model is None or not wraps or subject.older("accelerate", "1.14"):
        return
    names = subject.layer_classes or model.declared_classes or ()
    for name in sorted(model.embedding_parents.intersection(names)):
        kept = [class_name for class_name in names if class_name not in model.embedding_parents]
        yield {"name": name, "classes": ",".join(kept) or _classes(subject) or "NAME"}


def _mixed_dtypes(subject: Subject) -> Cases:
    upcasts = subject.engine is Engine.FSDP2 and subject.precision in ("bf16", "fp16")
    if subject.model is None or not subject.is_fsdp or upcasts:
        return None
    module = {"bfloat16": subject.model.kept_bf16, "float16": subject.model.kept_fp16}.get(subject.load_dtype, "")
    return {"module": module, "dtype": subject.load_dtype} if module else None


def _tied_apart(subject: Subject) -> bool:
    apart = subject.model is not None and subject.model.tied_apart
    return subject.engine is Engine.FSDP2 and apart and subject.on("fsdp_cpu_ram_efficient_loading")


def _expert_units(subject: Subject) -> Cases:
    experts = subject.model.expert_classes if subject.model and subject.is_fsdp else frozenset()
    return [{"name": name} for name in sorted(experts.intersection(subject.layer_classes))]


def storage_dtype(subject: Subject) -> str | None:
    """The dtype of 4-bit weights in units: that of mixed precision, bfloat16 for fp8, else of the other weights."""
    if subject.precision == "no" and subject.asked_dtype != "auto":
        return subject.asked_dtype
    return "bfloat16" if subject.precision == "fp8" else TORCH_DTYPES.get(subject.precision)


def _storage(subject: Subject) -> Cases:
    model, dtype = subject.model, storage_dtype(subject)
    if model is None or model.quantized != 4 or not subject.is_fsdp or model.quant_storage == dtype:
        return None
    return {"model": model.name, "stored": model.quant_storage, "dtype": dtype}


def _quantised(subject: Subject) -> Each:
    """A warning without arguments, which may ask for an adapter."""
    for clash in clashes(subject.job):
        if clash.parts == ("base",) and subject.model is not None:
            words = {"model": subject.model.name, "method": subject.model.quant_method, "what": clash.what}
            severity = None if subject.args is not None else "warning"
            yield words | {"why": clash.why, "fix": clash.fix, "severity": severity}


def _low_precision(subject: Subject) -> Cases:
    """Arguments may ask for 16 bits, or a 16-bit checkpoint, of which only train/sft.py loads float32."""
    dtype, auto = subject.asked_dtype, subject.asked_dtype == "auto"
    is_stated = not auto or (subject.is_fsdp and subject.trains_everything and not subject.uses_sft)
    if subject.precision != "no" or not is_stated or subject.load_dtype not in LOW_DTYPES or subject.uses_adapter:
        return None
    weights = f"a checkpoint in {subject.load_dtype}" if auto else f"--dtype {dtype}"
    return {"weights": weights, "unless": UNLESS_SFT if auto else ""}


ROWS = (
    Row(
        "AF501", "error", NAMES, "{model} has no {name}.{hint}", NOT_FOUND,
        "fsdp_transformer_layer_cls_to_wrap: {classes}", _absent_class, seen="P10 P65 plugin",
    ),
    Row(
        "AF503", "error", POLICY, "{model} names {names} as its layers and has none", NOT_FOUND,
        "fsdp_transformer_layer_cls_to_wrap: {classes}", lambda s: _declared(s, some=True), seen="P10 plugin",
    ),
    Row(
        "AF503", "warning", POLICY, "{model} names no layer class",
        "no layer becomes a unit and every rank gathers the whole model, silently",
        "fsdp_transformer_layer_cls_to_wrap: {classes}", lambda s: _declared(s, some=False), seen="P11 plugin ranks",
    ),
    Row(
        "AF505", "warning", "mixed_precision", "{module} stays float32 beside {dtype} weights",
        "FSDP stops: a unit needs one dtype, unless the script loads float32",
        "--dtype float32, or fsdp_version: 2 with mixed_precision: bf16", _mixed_dtypes, seen="P32 ranks",
    ),
    Row(
        "AF506", "error", RAM_LOADING, "the model's config ties embeddings that differ in its weights",
        "Accelerate stops: FSDP2 mapping failed", "tie_word_embeddings: false in the model's config.json", _tied_apart,
        seen="P74 accelerate#3870",
    ),
    Row(
        "AF507", "warning", NAMES, "{name} is one expert", "ranks gather different units and hang",
        "name the decoder layer only", _expert_units, seen="P58 pytorch#126616",
    ),
    Row(
        "AF509", "warning", "mixed_precision", "{model} stores 4-bit weights as {stored}",
        "they are not sharded, or FSDP stops, or casts them as numbers",
        "quantise it with bnb_4bit_quant_storage {dtype}",
        _storage, seen="P33 P34 accelerate#3983",
    ),
    Row(
        "AF512", "error", "distributed_type", "{model} is quantised ({method}): {what}", "{why}", "{fix}", _quantised,
        seen="transformers#26248", of=("quantised-full", "quantised-adapter", "quantised-twice"),
    ),
    combined(
        "AF513", "error", VERSION, "no-embedding-fsdp2", "shared-embedding-fsdp2", seen="ranks accelerate#4171",
        only=_embedding_units,
    ),
    Row(
        "AF514", "error", NAMES, "{name} holds the input embedding, of which Accelerate makes a unit itself",
        "prepare stops: TypeError: Invariant encountered: value was None when it should not be",
        "fsdp_transformer_layer_cls_to_wrap: {classes}", _holds_embedding, seen="ranks",
    ),
    combined("AF515", "error", VERSION, "scalars-fsdp1", seen="ranks"),
    Row(
        "AF613", "warning", "mixed_precision", "{weights} without mixed precision has no float32 master weights",
        "small updates are lost to rounding{unless}", "mixed_precision: bf16, or --dtype float32", _low_precision,
        seen="P14 ranks",
    ),
)  # fmt: skip
