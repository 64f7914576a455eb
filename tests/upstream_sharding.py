"""Experiments of `upstream_probe.py`: what becomes a unit, on which mesh, in which dtype, and what then fails."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BertConfig, CLIPConfig, PreTrainedConfig, T5Config, ViTConfig
from upstream_probe import (
    FULL,
    LAYER,
    V1,
    V2,
    launched,
    llama,
    local,
    lora,
    make_trainer,
    prepared,
    raised,
    rank,
    step,
    units,
)

NO_WRAP = {"fsdp_auto_wrap_policy": "NO_WRAP"}


def _without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def reshard_key_under_fsdp1(folder: Path) -> Any:
    _, model, _ = prepared(llama(), {**V1, "fsdp_reshard_after_forward": "NO_SHARD"})
    fsdp_config = {"version": 1, "reshard_after_forward": "no_shard", "transformer_layer_cls_to_wrap": LAYER}
    trainer = make_trainer(folder, llama(), None, fsdp=True, fsdp_config=fsdp_config)
    trainer.train()
    return {"yaml": model.sharding_strategy.name, "arguments": trainer.model.sharding_strategy.name}


def no_wrap_policy(folder: Path) -> Any:
    seen = {}
    for name, settings in {"fsdp1": V1, "fsdp2": V2}.items():
        _, model, _ = prepared(llama(), _without(settings, "fsdp_auto_wrap_policy"))
        seen[name] = units(model)
    return seen


def no_split_modules_empty(folder: Path) -> Any:
    seen = {}
    for name, settings in {"fsdp1": V1, "fsdp2": V2}.items():
        model = llama()
        model._no_split_modules = set()
        _, model, _ = prepared(model, _without(settings, "fsdp_transformer_layer_cls_to_wrap"))
        seen[name] = units(model)
    return seen


def upcast_before_meta(folder: Path) -> Any:
    model, seen = llama(torch.bfloat16), {}
    move = model.to

    def watched(*args: Any, **options: Any) -> Any:
        if args and args[0] == torch.device("meta"):
            seen["dtypes"] = sorted({str(p.dtype) for p in model.parameters()})
            seen["bytes"] = sum(p.untyped_storage().nbytes() for p in model.parameters())
        return move(*args, **options)

    model.to = watched
    elements = sum(p.numel() for p in model.parameters())
    prepared(model, {**V2, "fsdp_cpu_ram_efficient_loading": True}, "bf16")
    return {**seen, "elements": elements}


def ram_efficient_loading(folder: Path) -> Any:
    reference = llama()
    if rank() == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()
    launched({**V2, "fsdp_cpu_ram_efficient_loading": True})
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)]
    return {"real": all(same), "devices": sorted({str(p.device) for p in model.parameters()})}


def pure_bf16(folder: Path) -> Any:
    seen = {}
    for precision in ("no", "bf16"):
        _, model, optimizer = prepared(llama(torch.bfloat16), V2, precision)
        step(model, optimizer)
        moments = {str(s["exp_avg"].dtype) for s in optimizer.optimizer.state.values()}
        grads = {str(p.grad.dtype) for p in model.parameters()}
        seen[precision] = sorted({str(p.dtype) for p in model.parameters()} | moments | grads)
    return seen


def rope_buffers(folder: Path) -> Any:
    seen = {}
    for name, settings in {"fsdp1": V1, "fsdp2": V2}.items():
        _, model, _ = prepared(llama(), settings, "bf16")
        step(model)
        frequencies = next(buffer for key, buffer in model.named_buffers() if key.endswith("rotary_emb.inv_freq"))
        seen[name] = [str(frequencies.dtype), frequencies[1].item()]
    return seen


def size_based(folder: Path) -> Any:
    sized = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    default = prepared(llama(), {**V1, **sized})[1]
    fitting = prepared(llama(), {**V1, **sized, "fsdp_min_num_params": 7000})[1]
    fsdp2 = raised(prepared, llama(), {**V2, **sized, "fsdp_min_num_params": 7000})
    return {"default": units(default), "fitting": units(fitting), "fsdp2": fsdp2}


def weight_decay_groups(folder: Path) -> Any:
    seen = {}
    for flag in (False, True):
        trainer = make_trainer(folder, llama(), {**V1, "fsdp_use_orig_params": flag}, weight_decay=0.1, max_steps=1)
        trainer.train()
        undecayed = [group for group in trainer.optimizer.param_groups if group["weight_decay"] == 0]
        seen[str(flag)] = sum(len(group["params"]) for group in undecayed)
    return seen


def partly_frozen(folder: Path) -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.requires_grad_(False)
    flattened = {**V1, "fsdp_use_orig_params": False}
    adapted = make_trainer(folder, lora(), flattened, max_steps=1)
    return {"layer": raised(prepared, model, flattened), "lora": raised(adapted.train)}


def mixed_dtypes(folder: Path) -> Any:
    def attempt(settings: dict[str, Any], precision: str) -> str:
        model = llama(torch.bfloat16)
        for layer in model.model.layers:
            layer.input_layernorm.float()
        return raised(lambda: step(prepared(model, settings, precision)[1]))

    return {f"{v['fsdp_version']}-{p}": attempt(v, p) for v in (V1, V2) for p in ("no", "bf16")}


def optimizers(folder: Path) -> Any:
    """What a step with each does, the checkpoint after it, and one of the weights alone."""

    def attempt(settings: dict[str, Any], optim: str, **options: Any) -> str:
        options |= {"optim": optim, "max_steps": 1, "save_steps": 1}
        return raised(make_trainer(folder / optim, llama(), settings, **options).train)

    def attempts(settings: dict[str, Any], optim: str) -> list[str]:
        save = attempt(settings, optim, save_strategy="steps")
        step = save and attempt(settings, optim, save_strategy="no")
        return [step, save, attempt({**settings, **FULL}, optim, save_strategy="steps", save_only_model=True)]

    names = ("adafactor", "adamw_bnb_8bit", "lion_32bit", "adagrad", "sgd", "adamw_torch_fused")
    return {name: {engine: attempts(of, name) for engine, of in {"FSDP1": V1, "FSDP2": V2}.items()} for name in names}


def label_smoothing(folder: Path) -> Any:
    """The loss of one batch with and without smoothing so slight that it changes nothing."""

    def loss(settings: dict[str, Any], factor: float) -> float:
        trainer = make_trainer(folder, llama(), settings, label_smoothing_factor=factor, max_steps=1)
        trainer.train()
        return float(trainer.evaluate()["eval_loss"])

    return {name: [loss(value, factor) for factor in (0.0, 1e-9)] for name, value in {"FSDP1": V1, "FSDP2": V2}.items()}


def copies_of_one_rank(folder: Path) -> Any:
    """The share of the model that a rank holds under FSDP1's hybrid, with both ranks on one machine or on two."""
    seen, model = {}, llama()
    elements = sum(p.numel() for p in model.parameters())
    for together in ("2", "1"):
        os.environ["LOCAL_WORLD_SIZE"] = together
        _, model, _ = prepared(llama(), {**V1, "fsdp_sharding_strategy": "HYBRID_SHARD"})
        seen[together] = sum(p.numel() for p in model.parameters()) / elements
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 1}
    return {"FSDP1": seen, "FSDP2": raised(prepared, llama(), V2, parallelism_config=mesh)}


def strategy_under_fsdp2(folder: Path) -> Any:
    seen = {}
    for strategy in ("HYBRID_SHARD", "NO_SHARD"):
        _, model, _ = prepared(llama(), {**V2, "fsdp_sharding_strategy": strategy})
        first = next(model.parameters())
        held = sum(local(p).numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        seen[strategy] = [list(first.device_mesh.shape), held]
    return seen


def mesh_too_large(folder: Path) -> Any:
    mesh = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    return raised(prepared, llama(), V2, parallelism_config=mesh)


VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {"image_size": 8, "patch_size": 4}
TEXT = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "ViT": ViTConfig(**VISION, **IMAGE, architectures=["ViTForImageClassification"]),
    "BERT": BertConfig(**VISION, vocab_size=99, architectures=["BertForMaskedLM"]),
    "T5": T5Config(**TEXT, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"]),
    "CLIP": CLIPConfig(
        text_config={**VISION, "vocab_size": 99, "eos_token_id": 2, "bos_token_id": 1},
        vision_config={**VISION, **IMAGE},
        architectures=["CLIPModel"],
    ),
}
"""Models of whose input embedding or head Accelerate can make no unit under FSDP2, or not with each layer class."""


def units_of_embeddings(folder: Path) -> Any:
    def trained(name: str, settings: dict[str, Any], classes: str) -> None:
        torch.manual_seed(0)
        whole = getattr(transformers, CONFIGS[name].architectures[0])(CONFIGS[name])
        accelerator, model, optimizer = prepared(whole, {**settings, "fsdp_transformer_layer_cls_to_wrap": classes})
        ids = torch.tensor([[5, 6, 7, 8]])
        images = {"pixel_values": torch.ones(1, 3, 8, 8), "labels": torch.tensor([1])}
        accelerator.backward(model(**(images if name == "ViT" else {"input_ids": ids, "labels": ids})).loss)
        optimizer.step()

    return {
        "ViTEmbeddings": raised(trained, "ViT", V2, "ViTEmbeddings,ViTLayer"),
        "ViT": raised(trained, "ViT", V2, "ViTLayer"),
        "BERT": raised(trained, "BERT", V2, "BertLayer"),
        "T5": raised(trained, "T5", V2, "T5Block"),
        "T5 FSDP1": raised(trained, "T5", V1, "T5Block"),
        "CLIP": raised(trained, "CLIP", V2, "CLIPEncoderLayer"),
        "CLIP FSDP1": raised(trained, "CLIP", V1, "CLIPEncoderLayer"),
    }


def evaluate_before_train(folder: Path) -> Any:
    seen = {"fsdp2": raised(make_trainer(folder, llama(), V2).evaluate)}
    trainer = make_trainer(folder, llama(), V1)
    return {**seen, "fsdp1 evaluate": raised(trainer.evaluate), "fsdp1 train": raised(trainer.train)}


def checkpointing_twice(folder: Path) -> Any:
    settings = {**V2, "fsdp_activation_checkpointing": True}
    return raised(make_trainer, folder, llama(), settings, gradient_checkpointing=True)


def checkpointing_without_policy(folder: Path) -> Any:
    on = {**NO_WRAP, "fsdp_activation_checkpointing": True}
    _, model, _ = prepared(llama(), {**V1, **on})
    wrapped = [type(m._checkpoint_wrapped_module).__name__ for m in model.modules() if _is_checkpointed(m)]
    return {"fsdp2": raised(prepared, llama(), {**V2, **on}), "fsdp1": wrapped}


def _is_checkpointed(module: Any) -> bool:
    return type(module).__name__ == "CheckpointWrapper"


def generating(folder: Path) -> Any:
    def attempt(settings: dict[str, Any]) -> str:
        trainer = make_trainer(folder, llama(), settings, max_steps=1)
        trainer.train()
        ids = torch.tensor([[5, 6, 7]])
        return raised(trainer.model.generate, input_ids=ids, max_new_tokens=2, do_sample=False)

    return {"fsdp2": attempt(V2), "fsdp1": attempt(V1)}


def tied_embedding_class(folder: Path) -> Any:
    settings = {**V2, "fsdp_transformer_layer_cls_to_wrap": f"{LAYER},Embedding"}
    tied = raised(lambda: step(prepared(llama(tie_word_embeddings=True), settings)[1]))
    plain = raised(lambda: step(prepared(llama(tie_word_embeddings=True), V2)[1]))
    return {"with Embedding": tied, "without": plain}


def tied_adapters(folder: Path) -> Any:
    def attempt(settings: dict[str, Any], **options: Any) -> str:
        model = lora(llama(tie_word_embeddings=True), **options)
        return raised(make_trainer(folder, model, settings, max_steps=1).train)

    both = ["embed_tokens", "lm_head"]
    cases: dict[str, Any] = {"both": {"modules_to_save": both}, "one": {"modules_to_save": both[:1]}}
    cases |= {"head": {"modules_to_save": both[1:]}, "adapted head": {"target_modules": ["q_proj", "lm_head"]}}
    cases["tokens"] = {"trainable_token_indices": [1, 2]}
    seen = {"fsdp1": attempt(V1, **cases["both"])}
    for name, options in cases.items():
        for ram in (True, False):
            seen[f"{name} {ram}"] = attempt({**V2, "fsdp_cpu_ram_efficient_loading": ram}, **options)
    return seen


def dora(folder: Path) -> Any:
    def attempt(settings: dict[str, Any]) -> str:
        return raised(make_trainer(folder, lora(use_dora=True), settings, max_steps=1).train)

    return {"fsdp1": attempt(V1), "fsdp2": attempt(V2)}


def only_model(folder: Path) -> Any:
    seen = {"sharded": raised(make_trainer, folder, llama(), V2, save_only_model=True)}
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1}
    settings = {**V2, **FULL}
    seen["best"] = raised(make_trainer, folder, llama(), settings, save_only_model=True, eval_steps=1, **best)
    return seen
