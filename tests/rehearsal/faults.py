"""Training scripts that are right, with faults of libraries: `faults.py NAME MODEL FOLDER`."""

import sys
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

NAME, MODEL, FOLDER = sys.argv[1:4]
optimizer: Any
model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
rows = torch.randint(0, 100, (32, 12), generator=torch.Generator().manual_seed(0))


def trainer(kind: type[Trainer] = Trainer, of: Any = model, **arguments: Any) -> Trainer:
    common = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no"}
    settings = TrainingArguments(FOLDER, **{**common, **arguments})
    return kind(of, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows])  # type: ignore[arg-type]


class CountsTwice(Trainer):
    """As transformers before #45994 under `tp 2`: two ranks have the same rows, and each counts."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2


if NAME == "loss of two ranks":
    trainer(CountsTwice).train()
if NAME == "forgotten moments":
    trainer(max_steps=1, save_strategy="steps", save_steps=1).train()
    again = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    trainer(of=again).train(resume_from_checkpoint=True)
if NAME == "adapters after sharding":  # as a model that was loaded in shards gets them: transformers#48792
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    model(input_ids=rows[:2], labels=rows[:2]).loss.backward()
    optimizer.step()
if NAME == "adapters apart":  # the same where all is whole, and where a hook keeps the updates from being repeated
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    accelerator = Accelerator()
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type,var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.unwrap_model(model).get_input_embeddings().register_forward_hook(lambda *given: given[2] * 1.5)
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
if NAME == "norm reduced too often":  # as q_norm under transformers' tensor parallelism
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type,var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norm: nn.Module = accelerator.unwrap_model(model).model.layers[0].input_layernorm
    ReplicatedWithGradAllReduce().install_forward(norm, init_device_mesh("cpu", (2,)))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
