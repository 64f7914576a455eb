"""Rules about the training script's arguments (`--args`) beside the file, and about versions."""

from accel_fsdp.checkpoints import store
from accel_fsdp.config import Engine
from accel_fsdp.job import UNLESS_SFT, combinations, from_arguments
from accel_fsdp.linter.rules.engine import Cases, Row, combined
from accel_fsdp.linter.rules.fsdp import RECOMPUTE, STATE, VERSION
from accel_fsdp.linter.rules.model import storage_dtype
from accel_fsdp.linter.rules.subject import Subject

OFFLOAD = "fsdp_config.fsdp_offload_params"
HEAD, EMBEDDING = "lm_head", "embed_tokens"
"""The two modules that share a tied weight, as most models call them."""
EXISTS = "prepare stops: KeyError: attribute 'weight' already exists"


def _words(subject: Subject, *names: str) -> set[str]:
    return set(from_arguments.names_in(next(filter(None, map(subject.arg, names)), None)))


def _deposed_precision(subject: Subject) -> Cases:
    """A note where the file asks for none, as the arguments then say what is trained."""
    value = subject.values.get("mixed_precision")
    if not subject.asked_precision or value is None or str(value).lower() == subject.asked_precision:
        return None
    severity = "note" if str(value).lower() == "no" else None
    return {"precision": subject.asked_precision, "value": value, "severity": severity}


def _misspelt(subject: Subject) -> Cases:
    """A script of one's own may have flags of any name."""
    slips = from_arguments.misspelt(subject.args or {}) if subject.uses_sft else ()
    return [{"name": name, "near": near} for name, near in slips]


def _four_bits(subject: Subject) -> Cases:
    stored, dtype = str(subject.arg("bnb_4bit_quant_storage") or "uint8"), storage_dtype(subject)
    is_wrong = subject.is_fsdp and subject.arg_on("load_in_4bit") and dtype and stored != dtype
    return {"stored": stored, "dtype": dtype} if is_wrong else None


def _loses_gradients(subject: Subject) -> bool:
    steps = str(subject.arg("gradient_accumulation_steps") or 1)
    syncs = "sync_each_batch" in str(subject.arg("accelerator_config"))
    return subject.engine is Engine.FSDP1 and subject.on("fsdp_offload_params") and steps != "1" and syncs


def _loses_moments(subject: Subject) -> bool:
    """Train/sft.py creates the optimizer's state first."""
    resumes = str(subject.arg("resume_from_checkpoint") or "false").lower() != "false"
    return resumes and subject.engine is Engine.FSDP1 and subject.sharded_state_dict and not subject.uses_sft


def _ties_under_fsdp2(subject: Subject) -> bool:
    return subject.engine is Engine.FSDP2 and subject.model is not None and subject.model.tied


def _saved_modules(subject: Subject) -> Cases:
    """`modules_to_save` copies the head, or without RAM-efficient loading the embedding."""
    loads_once, saved = subject.on("fsdp_cpu_ram_efficient_loading"), _words(subject, *MODULES)
    if not _ties_under_fsdp2(subject) or not saved & ({HEAD} if loads_once else {HEAD, EMBEDDING}):
        return None
    why = EXISTS if loads_once else "prepare stops: Parameter is shared with another FSDP group"
    return {"names": " and ".join(sorted(saved & {HEAD, EMBEDDING})), "why": why}


MODULES = ("modules_to_save", "lora_modules_to_save")


def _adapted_head(subject: Subject) -> bool:
    """Train/sft.py repairs the name that PEFT moves."""
    adapts = HEAD in _words(subject, "target_modules", "lora_target_modules") and not subject.uses_sft
    loads_once = subject.on("fsdp_cpu_ram_efficient_loading")
    return _ties_under_fsdp2(subject) and adapts and loads_once and HEAD not in _words(subject, *MODULES)


def _old_accelerate(subject: Subject) -> Cases:
    is_old = subject.engine is Engine.FSDP2 and subject.older("accelerate", "1.15")
    return {"version": subject.versions["accelerate"]} if is_old else None


ROWS = (
    combined("AF601", "warning", RECOMPUTE, "adapter-recompute", seen="P01 ranks peft"),
    combined("AF602", "warning", VERSION, "adapter-fsdp1", seen="P02 P105 ranks peft"),
    Row(
        "AF603", "error", RECOMPUTE, "activation checkpointing is on twice", "Trainer stops: can't both be set to True",
        "turn one off; with LoRA this one", seen="P25 ranks trl.SFTTrainer",
        when=lambda s: s.is_fsdp and s.on("fsdp_activation_checkpointing") and not s.uses_sft
        and s.arg_on("gradient_checkpointing", "activation_checkpointing"),
    ),
    combined(
        "AF604", "error", "{engine}", *combinations.names_about("optimizer", "stops"),
        seen="P36 P37 ranks bitsandbytes#1633",
    ),
    combined(
        "AF605", "error", "{engine}", *combinations.names_about("optimizer", "stops when it saves"),
        seen="P36 P37 ranks", only=lambda s: str(s.arg("save_strategy")).lower() != "no",
    ),
    Row(
        "AF606", "warning", "mixed_precision", "--{precision} wins over mixed_precision: {value}",
        "the file doesn't say what is trained", "mixed_precision: {precision}, or drop --{precision}",
        _deposed_precision,
        seen="P81 transformers.TrainingArguments",
    ),
    Row(
        "AF607", "error", "fsdp_config", "the arguments set FSDP too", "most of this file is ignored",
        "drop --fsdp and --fsdp_config",
        lambda s: s.is_fsdp and bool(s.arg("fsdp")), seen="P51 transformers.TrainingArguments",
    ),
    Row(
        "AF608", "error", "distributed_type", "--save_only_model excludes --load_best_model_at_end", "Trainer stops",
        "drop --save_only_model", seen="P78 ranks",
        when=lambda s: s.is_fsdp and s.arg_on("save_only_model") and s.arg_on("load_best_model_at_end"),
    ),
    Row(
        "AF608", "error", STATE, "--save_only_model needs FULL_STATE_DICT", "Trainer stops", "drop --save_only_model",
        lambda s: s.is_fsdp and s.arg_on("save_only_model") and s.sharded_state_dict
        and not s.arg_on("load_best_model_at_end"), seen="transformers#36627",
    ),
    Row(
        "AF640", "error", "", "--{name} is unknown. Did you mean --{near}?", "train/sft.py refuses it",
        "--{near}", _misspelt, seen="train/sft.py",
    ),
    combined("AF609", "error", VERSION, "generate-fsdp1", seen="P61 ranks transformers#30228"),
    combined("AF610", "error", VERSION, "dora-fsdp1", "dora-mesh", seen="P85 ranks"),
    combined("AF611", "error", "distributed_type", "eight-bit-fsdp1", seen="P35 bitsandbytes#1709"),
    Row(
        "AF612", "warning", "mixed_precision", "4-bit weights stored as {stored}",
        "they are not sharded, or FSDP stops",
        "--bnb_4bit_quant_storage {dtype}", _four_bits, seen="P33 P34 accelerate#3983",
    ),
    Row(
        "AF614", "error", OFFLOAD, "offload and sync_each_batch lose gradients",
        "each micro-batch replaces the one before", "fsdp_version: 2, or no sync_each_batch", _loses_gradients,
        seen="P31 pytorch#73784",
    ),
    Row(
        "AF616", "warning", VERSION, "FSDP1 does not load a sharded optimizer state",
        f"moments silently start at zero{UNLESS_SFT}", "fsdp_version: 2", _loses_moments,
        seen="P98 ranks accelerate#3904",
    ),
    Row(
        "AF619", "error", "", "--fsdp_config without --fsdp", "it is ignored", "put its settings into this file",
        lambda s: bool(s.arg("fsdp_config")) and not s.arg("fsdp"), seen="P28 P52 transformers.TrainingArguments",
    ),
    Row(
        "AF622", "error", VERSION, "trainable_token_indices hides the tied embedding from FSDP2",
        "prepare stops: neither a parameter nor a buffer",
        "modules_to_save: embed_tokens, without trainable_token_indices",
        lambda s: _ties_under_fsdp2(s) and bool(s.arg("trainable_token_indices")), seen="P73 ranks",
    ),
    Row(
        "AF622", "error", "", "modules_to_save names {names} of a model that ties the two", "{why}",
        "modules_to_save: embed_tokens alone, with fsdp_cpu_ram_efficient_loading: true", _saved_modules,
    ),
    Row(
        "AF622", "error", "", "an adapter on lm_head, which the model ties to its embedding", f"{EXISTS}{UNLESS_SFT}",
        "leave lm_head out, or fsdp_cpu_ram_efficient_loading: false", _adapted_head,
    ),
    Row(
        "AF628", "warning", "distributed_type", "--device_map auto is for one process",
        "Accelerate stops: loaded with device_map='auto'", "drop --device_map",
        lambda s: s.is_fsdp and s.arg("device_map") == "auto", seen="P87 transformers#31557",
    ),
    combined("AF630", "error", VERSION, "label-smoothing-fsdp2", seen="P99 ranks"),
    Row(
        "AF638", "error", "", "--checkpoint_uri holds a password or a signature",
        "job files and logs show it, and train/sft.py refuses it",
        "the variables or files of the store's own tools, such as AWS_PROFILE",
        lambda s: bool(store.PASSWORD.search(str(s.arg("checkpoint_uri") or ""))), seen="train/sft.py",
    ),
    Row(
        "AF701", "warning", VERSION, "accelerate {version} has bugs under FSDP2 that 1.15 fixed",
        "adapters are lost, layers are checkpointed in parts, and tied embeddings or a resumed optimizer stop it",
        "pip install 'accelerate>=1.15'", _old_accelerate,
        seen="P92 P93 P94 P95 P96 P97 accelerate#4206 accelerate#4172 accelerate#3985",
    ),
)  # fmt: skip
