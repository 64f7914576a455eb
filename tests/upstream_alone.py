"""Experiments of `upstream_probe.py` that a single rank can show, also with a checkpoint that two ranks wrote."""

import logging
from pathlib import Path
from typing import Any

import torch
from upstream_probe import FULL, V1, V2, AtStart, llama, local, make_trainer, prepared, step


class _Heard(logging.Handler):
    """Keeps the messages about random states."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.levels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "RNG file" in record.getMessage():
            self.levels.append(record.levelname)


def _norms(model: Any, optimizer: Any) -> list[float]:
    moments = [local(state["exp_avg"]).double().square().sum() for state in optimizer.state.values()]
    return [sum(moments).sqrt().item(), sum(local(p).double().sum() for p in model.parameters()).item()]


def resume_on_one_rank(folder: Path) -> Any:
    checkpoint = folder.parent.parent / "saving" / "for_later" / "full" / "checkpoint-1"
    look, heard, logger = AtStart(_norms), _Heard(), logging.getLogger("transformers.trainer")
    trainer = make_trainer(folder, llama(), V2, callbacks=[look])
    usual = logger.getEffectiveLevel()
    logger.addHandler(heard)
    logger.setLevel(logging.DEBUG)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return {"seen": look.seen, "levels": heard.levels, "usual": logging.getLevelName(usual)}


def loss_in_16_bits(folder: Path) -> Any:
    ids = torch.tensor([[5, 6, 7, 8]])
    models = {name: prepared(llama(), settings, "bf16")[1] for name, settings in {"FSDP1": V1, "FSDP2": V2}.items()}
    return {name: str(model(input_ids=ids, labels=ids).loss.dtype) for name, model in models.items()}


def count_in_16_bits(folder: Path) -> Any:
    """What a model divides the loss of 271 tokens by, of plain Trainer; and under fp16 that of 70,000."""
    seen: dict[str, float] = {}
    row = {"input_ids": [5] * 272, "labels": [5] * 272}
    for name, settings in {"FSDP1": V1, "FSDP2": V2, "none": None}.items():
        model = llama(max_position_embeddings=512)
        trainer = make_trainer(folder, model, settings, "bf16", max_steps=1, per_device_train_batch_size=1)
        trainer.train_dataset = [row]
        model.loss_function = _counting(seen, name)
        trainer.train()
    model = prepared(llama(), V2, "fp16")[1]
    model.loss_function = _counting(seen, "fp16")
    ids = torch.tensor([[5, 6, 7, 8]])
    model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(70_000.0))
    return seen


def _counting(seen: dict[str, float], name: str) -> Any:
    def loss(logits: torch.Tensor, num_items_in_batch: Any, **_: Any) -> torch.Tensor:
        seen[name] = float(num_items_in_batch)
        return logits.float().mean()

    return loss


def dropout_when_recomputed(folder: Path) -> Any:
    """Whether a layer begins with the same random numbers when backward computes it again."""
    seen = {}
    for name, settings in {"FSDP1": V1, "FSDP2": V2}.items():
        model = llama(attention_dropout=0.5, attn_implementation="eager", use_cache=False)
        states: list[int] = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_, states=states: states.append(_random_state()))
        step(prepared(model, {**settings, "fsdp_activation_checkpointing": True})[1].train())
        seen[name] = [len(states), states[:2] == states[:1:-1]]
    return seen


def _random_state() -> int:
    return hash(bytes(torch.get_rng_state().tolist()))


def best_is_the_newest(folder: Path) -> Any:
    """The step that was the best, and whether its checkpoint was noted as that."""
    seen = {}
    for name, settings in {"sharded": V2, "full": {**V2, **FULL}}.items():
        every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
        trainer = make_trainer(folder / name, llama(), settings, load_best_model_at_end=True, **every)
        trainer.train()
        seen[name] = [trainer.state.best_global_step, trainer.state.best_model_checkpoint is not None]
    return seen
