"""A user's loop with Accelerate: MODEL DATA OUT [checkpoint_uri]. Rank 0 writes the losses to OUT/losses.json."""

import json
import os
import sys
from pathlib import Path

import datasets
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

import accel_fsdp

STEPS, ROWS = 10, 12
model_name, data, output, *uri = sys.argv[1:]


def main() -> None:
    accelerator = Accelerator()
    zero = accelerator.state.deepspeed_plugin
    if zero is not None:  # it asks for this where no DataLoader is prepared
        zero.deepspeed_config["train_micro_batch_size_per_gpu"] = ROWS // accelerator.num_processes
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    texts = datasets.load_dataset("json", data_files=data, split="train")["text"]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, 0, STEPS)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(scheduler)  # a prepared one takes a step for each rank
    checkpoints = accel_fsdp.Checkpoints(
        accelerator, output, keep=2, async_checkpoints=zero is None, checkpoint_uri=uri[0] if uri else None
    )
    first = checkpoints.resume()
    log = Path(output) / "losses.json"
    losses = json.loads(log.read_text())[:first] if first else []
    for step in range(first + 1, STEPS + 1):
        rows = [texts[(step * ROWS + row) % len(texts)] for row in range(ROWS)][
            accelerator.process_index :: accelerator.num_processes
        ]
        batch = tokenizer(rows, padding="max_length", truncation=True, max_length=24, return_tensors="pt")
        loss = model(**batch, labels=batch["input_ids"]).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.is_main_process:
            log.write_text(json.dumps(losses))
        end, number = os.environ.get("KILL_STEP", "0 9").split()
        if step == int(end) and accelerator.process_index == 1:
            os.kill(os.getpid(), int(number))
        stopping = checkpoints.stopping(step)
        if step % 2 == 0 or stopping:
            checkpoints.save(step)
        if stopping:
            break
    checkpoints.finish()


main()
