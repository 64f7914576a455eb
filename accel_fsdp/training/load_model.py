"""The model and tokenizer as `train/sft.py` loads them: explicit dtypes, vocabulary, adapters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from accel_fsdp import console, models
from accel_fsdp.errors import UserError, did_you_mean, first_line
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.library_internals import Internal
from accel_fsdp.models import causal, counting
from accel_fsdp.training import mesh, patches
from accel_fsdp.training.arguments import ModelArguments
from accel_fsdp.training.data import chat_template
from accel_fsdp.units import counted, millions

if TYPE_CHECKING:
    from torch import nn

RELIES_ON = (
    Internal(
        "peft.utils.transformers_weight_conversion:convert_peft_config_for_transformers",
        "peft_config model conversions",
    ),
    Internal("transformers:PreTrainedModel._keep_in_fp32_modules"),
    Internal("transformers:PreTrainedModel._keep_in_fp32_modules_strict"),
    Internal("transformers:PreTrainedModel._no_split_modules"),
    Internal("transformers:PreTrainedModel._tied_weights_keys"),
    Internal("transformers:PreTrainedModel.get_expanded_tied_weights_keys", "self all_submodels"),
)
COMPUTED = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes that FSDP casts to under `mixed_precision`."""


def load_tokenizer(options: ModelArguments, chat_template_path: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer; one without a padding token pads with its end-of-sequence token."""
    config = models.read_config(*options.source)
    if _first_rank():
        causal.check_config(config, options.model_name_or_path, options.trust_remote_code)
    mesh.check(config, options.method, options.lora_target_modules)
    tokenizer: PreTrainedTokenizerBase = models.read_tokenizer(*options.source)
    vocabulary = tokenizer.get_vocab()
    for name in ("eos_token", "pad_token"):
        value = getattr(options, name)
        if value is not None and value not in vocabulary:
            raise UserError(
                f"--{name} {value} is not a token of {options.model_name_or_path}.{did_you_mean(value, vocabulary)}",
                why="a token without a row in the embedding can't be trained",
                fix="a token of the vocabulary, such as "
                + ", ".join(map(str, tokenizer.all_special_tokens[:3] or ["those it has"])),
            )
    tokenizer.eos_token = options.eos_token or tokenizer.eos_token
    tokenizer.pad_token = options.pad_token or tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.eos_token is None and _first_rank():
        console.say("the tokenizer has no end token: the model won't learn where to stop (--eos_token)", style="yellow")
    chat_template.use_template(tokenizer, chat_template_path)
    return tokenizer


def _first_rank() -> bool:
    return LaunchEnvironment.now().rank == 0


def load_model(options: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> "nn.Module":
    """Loads the model on the CPU, resized and with an adapter where asked for; `prepare` shards it later.

    Raises:
        UserError: the weights can't be read, the vocabulary is too small, or no module matches `lora_target_modules`.
    """
    with _convert_errors(options.model_name_or_path):
        model = _without_weights(options) if receives_weights(options) else _with_weights(options)
    if _first_rank():
        if not (options.load_in_4bit or LaunchEnvironment.now().by_transformers):
            causal.check_model(model, options.model_name_or_path)
        dtype, reason = weight_dtype(options)
        console.say(f"weights: {str(dtype).removeprefix('torch.')} ({reason})", style="cyan")
        if language := models.language_parameters(model):
            total_parameters = sum(map(counting.numel, model.parameters()))
            part = f"language part {millions(language, 1)} of {millions(total_parameters, 1)}"
            console.say(f"{type(model).__name__}, {part}: rows of text reach no other weights", style="cyan")
    _fit_vocabulary(model, tokenizer, options)
    return with_adapter(model, options) if options.use_peft else model


@contextmanager
def _convert_errors(name: str) -> Iterator[None]:
    """Converts the errors of loading a model, on ranks with and without weights, into one message."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise UserError(
            f"cannot load the weights of {name}: {first_line(error)}",
            why="there is nothing to train",
            fix="check the name, or give a folder that save_pretrained wrote",
        ) from error


def receives_weights(options: ModelArguments) -> bool:
    """Whether rank 0 sends this rank its shards, so that it need not read the weights.

    transformers 5.23 reads all weights on all ranks all the same, and a checkpoint of another dtype is then copied in
    full by every rank. Accelerate sends neither 4-bit weights nor those of modules that FSDP ignores.
    """
    launch = LaunchEnvironment.now()
    sends_all = launch.uses_fsdp and not options.load_in_4bit and not launch.ignores_modules
    return launch.loads_on_rank_zero and sends_all and launch.rank > 0


def _without_weights(options: ModelArguments) -> Any:
    """A model of the right shapes whose memory is never touched, so that the system doesn't allocate it.

    Not on the meta device: Accelerate's FSDP2 path distinguishes parameters by their addresses (1.15). A model that
    keeps some weights in another dtype, or is quantised, is known only once it is loaded.
    """
    config = models.read_config(*options.source)
    dtype, _ = weight_dtype(options)
    with no_init_weights():
        model = models.text_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=options.attn_implementation,
            trust_remote_code=options.trust_remote_code,
        )
    mixed = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    if getattr(config, "quantization_config", None) or (mixed and dtype != torch.float32):
        return _with_weights(options)
    model.tie_weights()
    return model


def _with_weights(options: ModelArguments) -> Any:
    model, loading = models.text_class(models.read_config(*options.source)).from_pretrained(
        options.model_name_or_path,
        revision=options.model_revision,
        trust_remote_code=options.trust_remote_code,
        dtype=weight_dtype(options)[0],
        attn_implementation=options.attn_implementation,
        quantization_config=_quantization(options),
        output_loading_info=True,
        **mesh.loading(),
    )
    if missing := sorted(loading["missing_keys"]):
        raise UserError(
            f"{options.model_name_or_path} lacks {counted(len(missing), 'weight')} of its model, first {missing[0]}",
            why="they would be trained from random values",
            fix="download or export the model again",
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes 0.50 would pack the weights again in the first evaluation, while FSDP manages them
            module.support_avx512bf16_for_cpu = False
    return model


def weight_dtype(options: ModelArguments) -> tuple[torch.dtype, str]:
    """The dtype in which the weights are loaded, and why.

    It is explicit, because transformers 5 keeps a checkpoint's 16 bits, and under `mixed_precision: 'no'` weights,
    gradients and Adam's state would then silently have 16 bits.
    """
    launch = LaunchEnvironment.now()
    if options.dtype != "auto":
        chosen: torch.dtype = getattr(torch, options.dtype)
        if chosen == torch.float32 or options.use_peft:
            return chosen, "--dtype"
        if launch.uses_fsdp and launch.mixed_precision != "no":  # otherwise Accelerate would cast on every rank
            return torch.float32, f"not {options.dtype}: FSDP keeps float32 masters under mixed_precision"
        if launch.uses_deepspeed:
            return chosen, "--dtype; DeepSpeed keeps float32 masters beside it"
        return chosen, "--dtype; no float32 master weights: small updates are lost"
    if not options.use_peft:
        return torch.float32, "master weights of full training"
    stored = models.read_config(*options.source).dtype
    return (stored, "the checkpoint's own, frozen under the adapter") if stored else (torch.float32, "none is named")


def _quantization(options: ModelArguments) -> Any:
    """4-bit weights packed in a floating dtype, the only kind that FSDP can shard; computed in that same dtype."""
    if not options.load_in_4bit:
        return None
    from transformers import BitsAndBytesConfig

    launch = LaunchEnvironment.now()
    mixed = launch.mixed_precision
    storage, computed = getattr(torch, options.bnb_4bit_quant_storage), COMPUTED.get(mixed)
    if launch.uses_fsdp and (not storage.is_floating_point or storage != (computed or storage)):
        raise UserError(
            f"--bnb_4bit_quant_storage {options.bnb_4bit_quant_storage} under mixed_precision: {mixed}",
            why="FSDP shards floating weights alone, and casts other dtypes: packed weights would become noise",
            fix=f"--bnb_4bit_quant_storage {str(computed or torch.bfloat16).removeprefix('torch.')}",
        )
    if launch.uses_fsdp1 and not computed and storage != torch.float32:
        raise UserError(
            f"--bnb_4bit_quant_storage {options.bnb_4bit_quant_storage} under FSDP1 with mixed_precision: 'no'",
            why="the first step would stop: FSDP1 leaves some inputs in float32, and bitsandbytes 0.50 wants one dtype",
            fix="mixed_precision: bf16 in the YAML, or --bnb_4bit_quant_storage float32 --dtype float32",
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=storage if storage.is_floating_point else torch.bfloat16,
    )


def _fit_vocabulary(model: Any, tokenizer: PreTrainedTokenizerBase, options: ModelArguments) -> None:
    """Enlarges the embedding for the tokenizer's tokens, if allowed.

    Never shrinks it: many models pad their vocabulary.
    """
    rows, tokens = _vocabulary_rows(model), max(tokenizer.get_vocab().values(), default=-1) + 1  # there may be gaps
    if tokens <= rows:
        return
    what = f"the tokenizer's largest token is {tokens - 1}, the model's embedding has {rows} rows"
    if LaunchEnvironment.now().by_transformers:
        why = "a model that is split over the mesh while it is loaded can't get more rows"
        fix = "add them once before: train/sft.py --resize_vocab with FSDP alone and --max_steps 1"
        raise UserError(what, why=why, fix=fix)
    if not options.resize_vocab:
        why = "a token without a row stops training with an index error"
        fix = "--resize_vocab adds the rows, or use the tokenizer that belongs to this model"
        raise UserError(what, why=why, fix=fix)
    model.resize_token_embeddings(tokens, mean_resizing=not receives_weights(options))


def _vocabulary_rows(model: Any) -> int:
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # under ZeRO-3 the parameter itself is empty


def with_adapter(model: Any, options: ModelArguments) -> "nn.Module":
    """The model with a LoRA adapter, and all else frozen.

    Raises:
        UserError: the target modules can't get one.
    """
    from peft import LoraConfig, get_peft_model

    patches.fix_adapters()
    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=_target_modules(model, options.lora_target_modules),
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
        modules_to_save=options.lora_modules_to_save or None,
        task_type="CAUSAL_LM",
    )
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    ties = {part: names for part in parts if (names := part.get_expanded_tied_weights_keys(all_submodels=False))}
    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        fix = "--lora_target_modules all-linear, or names of linear modules such as q_proj v_proj"
        if "lora_dropout" in str(error):
            fix = "--lora_dropout 0; or --lora_target_modules all-linear, which leaves fused experts as they are"
        what = f"no adapter can be made: {first_line(error)}"
        raise UserError(what, why="nothing would be trained", fix=fix) from error
    _rename_ties(ties)
    launch = LaunchEnvironment.now()
    if launch.uses_fsdp1 and launch.mixed_precision != "no":
        patches.leave_casts_to_autocast(adapted)
    return adapted


def _target_modules(model: Any, names: list[str]) -> Any:
    """The modules that get an adapter.

    PEFT 0.21's all-linear takes in the fused experts of some mixtures, whose adapters allow neither dropout nor experts
    that are divided. Here it is the linear layers alone, without shared experts whose names are also those of experts.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    if names != ["all-linear"]:
        return names
    config = LoraConfig(target_modules="all-linear")
    convert_peft_config_for_transformers(config, model, None)
    return config.target_modules


def _rename_ties(ties: Mapping[PreTrainedModel, Mapping[str, str]]) -> None:
    """Renames tied weights that PEFT has moved, because under FSDP2 Accelerate has transformers tie them again by name.

    An adapter on a tied head moves its weight from `lm_head` to `lm_head.base_layer`.
    """
    for part, names in ties.items():
        part._tied_weights_keys = {_name_inside(part, tied): _name_inside(part, new) for tied, new in names.items()}
        part.all_tied_weights_keys = dict(part._tied_weights_keys)


def _name_inside(model: Any, name: str) -> str:
    """The name of a weight of a module that may have an adapter."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.base_layer.{leaf}" if hasattr(model.get_submodule(path), "base_layer") else name
