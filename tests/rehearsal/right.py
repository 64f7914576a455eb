"""A training script that is unusual and right: `right.py WAYS MODEL [FOLDER]`, with names of ways between commas."""

import contextlib
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

WAYS, MODEL = sys.argv[1].split(","), sys.argv[2]
dcp: Any = checkpoint
BY_HAND = "accumulates by hand" in WAYS
EACH = 2 if "accumulates" in WAYS or BY_HAND else 1
HOOKS = {
    "gradients in fp16": DDPCommunicationHookType.FP16,
    "gradients in bf16": DDPCommunicationHookType.BF16,
    "gradients of low rank": DDPCommunicationHookType.POWER_SGD,
}
handlers = [DistributedDataParallelKwargs(comm_hook=hook) for way, hook in HOOKS.items() if way in WAYS]
accelerator = Accelerator(gradient_accumulation_steps=1 if BY_HAND else EACH, kwargs_handlers=handlers)  # type: ignore[arg-type]
torch.manual_seed(0)
dropout = {"attention_dropout": 0.5} if "dropout" in WAYS else {}
model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, **dropout).train()
untrained = copy.deepcopy(model)
loader: Any = DataLoader(torch.randint(0, 100, (32, 12)), batch_size=2)  # type: ignore[arg-type]
if "frozen weights" in WAYS:
    for layer in model.model.layers[:1]:
        layer.requires_grad_(False)
if "buffers" in WAYS:

    class Normed(nn.Module):
        """Multiplies by a number that falls in each step, and keeps statistics of the rank's own rows."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.statistics = inner, nn.BatchNorm1d(model.config.hidden_size)
            self.register_buffer("heat", torch.ones(()))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.statistics(x.transpose(1, 2)).transpose(1, 2) * self.heat.clone()
            self.heat.mul_(0.5)  # type: ignore[operator]
            return self.inner(x)

    model.lm_head = Normed(model.lm_head)
if "logs a gradient" in WAYS:
    norms: list[torch.Tensor] = []
    model.lm_head.weight.register_hook(lambda gradient: norms.append(gradient.norm()))
if "compiled" in WAYS:
    model = torch.compile(model, backend="eager")
parameters = list(model.parameters())
optimizer: Any = torch.optim.AdamW(parameters, lr=1e-3)
if "rate in a tensor" in WAYS:
    optimizer = torch.optim.AdamW(parameters, lr=torch.tensor(1e-3))
if "momentum" in WAYS:
    optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)
if "groups" in WAYS:
    decayed = [weight for weight in parameters if weight.dim() > 1]
    plain = [weight for weight in parameters if weight.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 1e-2}], lr=1e-3)
if "trains the head alone" in WAYS:
    optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-3)
if "averages gradients by hand" in WAYS:
    loader = accelerator.prepare(loader)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if "sums gradients" in WAYS:
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        unit.set_gradient_divide_factor(1.0)
if "hook" in WAYS:
    accelerator.unwrap_model(model).model.layers[0].mlp.register_forward_hook(lambda *given: given[2] * 1.5)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    if "own loss" in WAYS:
        logits = model(input_ids=batch).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).div(2), batch[:, 1:].flatten(), label_smoothing=0.1)
    output = model(input_ids=batch, labels=batch if "skips a mean" not in WAYS or step < 2 else batch * 0 - 100)
    loss: torch.Tensor = output.loss
    if "skips a mean" in WAYS:
        loss = torch.nan_to_num(loss)
    if "loss and logits" in WAYS:
        loss = loss + 1e-2 * output.logits.float().logsumexp(-1).square().mean()
    if "penalty" in WAYS:
        loss = loss + sum(1e-2 * weight.square().sum() for weight in model.parameters())
    if "probes gradients" in WAYS:  # as an adaptive weight of a loss does
        (probed,) = torch.autograd.grad(loss, output.logits, retain_graph=True)
        loss = loss * (1 + probed.norm().detach())
    if "summed loss" in WAYS:  # the mean of a sum is right, and a copy is for a log
        accelerator.print("loss", accelerator.reduce(loss.detach(), "mean").item())
        torch.distributed.all_reduce(loss)
    if "two passes" in WAYS:
        loss = loss + model(input_ids=batch.flip(1), labels=batch).loss
    return loss


for step, batch in enumerate(loader):
    if "averages weights" in WAYS:  # as local SGD does
        with model.no_sync():
            loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            for weight in model.parameters():
                torch.distributed.all_reduce(weight.data)
                weight.data /= accelerator.num_processes
    elif "averages gradients by hand" in WAYS:  # as PyTorch's tutorial does
        loss_of(batch).backward()
        for weight in model.parameters():
            torch.distributed.all_reduce(weight.grad)
            weight.grad /= accelerator.num_processes
        optimizer.step()
        optimizer.zero_grad()
    elif BY_HAND:
        is_last = step % EACH == EACH - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            accelerator.backward(loss_of(batch))
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    else:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(batch))
            if "skips a batch" in WAYS and step == 0:
                optimizer.zero_grad()
                continue
            if "clips each micro-batch" in WAYS or ("clips" in WAYS and accelerator.sync_gradients):
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1e-2)
            optimizer.step()
            optimizer.zero_grad()
    if "compares weights" in WAYS:
        apart = [accelerator.reduce(weight.detach(), "mean") - weight for weight in model.parameters()]
        assert max(float(weight.abs().max()) for weight in apart) < 1e-6
    if "weights clamped" in WAYS:
        with torch.no_grad():
            for weight in model.parameters():
                weight.clamp_(-0.03, 0.03)
    if "slow rank" in WAYS and step == 0 and accelerator.process_index == 1:
        time.sleep(5)  # as to tokenize, while the others wait in a collective
    if "evaluates" in WAYS:
        model.eval()
        with torch.no_grad():
            model(input_ids=batch)
        model.train()
    if step == 3 * EACH - 1:
        break

own = accelerator.process_index
if "gathers padded" in WAYS:
    accelerator.gather(accelerator.pad_across_processes(torch.zeros(2, 3 + own), dim=1))
if "generates" in WAYS:
    model.generate(batch[:1], max_new_tokens=2 + own, synced_gpus=True)
if "saves" in WAYS:
    folder, rank, is_main = Path(sys.argv[3]), accelerator.process_index, accelerator.is_main_process
    folder.mkdir(exist_ok=True)
    inner = accelerator.unwrap_model(model)
    resumed = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(resumed, folder / f"resumed-{rank}.pt")
    accelerator.save_state(str(folder / "state"))
    state = accelerator.get_state_dict(model)
    inner.save_pretrained(folder / "model", state_dict=state, is_main_process=is_main)
    of_backbone = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    inner.model.save_pretrained(folder / "backbone", state_dict=of_backbone, is_main_process=is_main)
    untrained.save_pretrained(folder / "reference", is_main_process=is_main)
    accelerator.save({name: tensor.bfloat16() for name, tensor in state.items()}, folder / "bf16.safetensors", True)
    sharded = state if "ddp" in WAYS else get_model_state_dict(model)
    dcp.save({"model": sharded, "step": torch.tensor(3)}, checkpoint_id=folder / "dcp")
    if "fsdp1" not in WAYS:  # whose shards torch does not save so
        dcp.async_save({"model": sharded}, checkpoint_id=folder / "dcp-async").result()
    if is_main:
        torch.save({"losses": [1.0, 2.0], "rows": torch.ones(3)}, folder / "metrics.pt")
        save_file({"lm_head.weight": state["lm_head.weight"]}, folder / "head.safetensors")
    for turn in range(accelerator.num_processes):
        if turn == rank:
            torch.save({"rank": rank}, folder / "in-turn.pt")
        accelerator.wait_for_everyone()
