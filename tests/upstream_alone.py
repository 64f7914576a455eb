"""Experiments of `upstream_probe.py` on a single rank: what becomes of a checkpoint that two ranks wrote."""

import logging
from pathlib import Path
from typing import Any

from upstream_probe import V2, AtStart, llama, local, make_trainer


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
