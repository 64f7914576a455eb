"""A training step without FSDP and Trainer, the peer of `gpu_training.py`: `python gpu_plain.py CASE DEVICE`.

The model has random weights, a step is forward under autocast, backward and fused AdamW, and rows are packed: documents
of a quarter of a row. Prints `MEASURED {...}`: the median seconds of a step, and the most bytes allocated.
"""

import json
import sys
import time
from statistics import median
from typing import Any

import gpu_case
import torch

STEPS, WARM_UP = 8, 3


def prepared(case: dict[str, Any], device: str) -> Any:
    """The model, with PEFT's adapters if the case trains one."""
    model = gpu_case.built(case, device)
    if case["adapter"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear"))
    if case["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def main() -> None:
    """Times the steps."""
    case, device = json.loads(sys.argv[1]), sys.argv[2]
    model = prepared(case, device)
    optimizer = gpu_case.optimizer_of(case, model)
    ids = torch.randint(case["config"]["vocab_size"], (case["rows"], case["length"]), device=device)
    positions = (torch.arange(case["length"], device=device) % (case["length"] // 4)).expand(case["rows"], -1)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=case["precision"] != "no"):
            loss = model(input_ids=ids, position_ids=positions, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    print("MEASURED " + json.dumps({"seconds": median(seconds[WARM_UP:]), "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
