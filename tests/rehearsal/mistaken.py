"""A training script as people write it, with one mistake: `mistaken.py NAME MODEL FOLDER`; `none` has none.

It uses Accelerate and transformers alone, and knows nothing of the rehearsal.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM

NAME, MODEL, FOLDER = sys.argv[1:4]
HIDDEN_LATE = ("NaN hidden late", "NaN masked late", "NaN left out late")
ACCUMULATED = 2 if "divided" in NAME or NAME in ("steps early", "optimizer not prepared") else 1
accelerator = Accelerator(log_with="wandb" if NAME == "tracker" else None, gradient_accumulation_steps=ACCUMULATED)
if NAME == "uneven batches":
    accelerator.even_batches = False
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
if NAME == "other seeds":
    torch.manual_seed(accelerator.process_index)
    model.lm_head.reset_parameters()
    torch.manual_seed(0)
rows = torch.randint(0, 100, ({"uneven batches": 6, "batch left over": 20}.get(NAME, 16), 12))
loader = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
if NAME == "sharded twice":
    loader = DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows))  # type: ignore[arg-type, var-annotated]
if NAME == "another shuffle":
    order = torch.Generator().manual_seed(accelerator.process_index)
    loader = DataLoader(rows, batch_size=2, shuffle=True, generator=order)  # type: ignore[arg-type]
if NAME == "another order":

    class Shuffled(Sampler[int]):
        """Each rank has an order of its own, and Accelerate gives it a part of that."""

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(16, generator=torch.Generator().manual_seed(accelerator.process_index)).tolist())

        def __len__(self) -> int:
            return 16

    loader = DataLoader(rows, batch_size=2, sampler=Shuffled())  # type: ignore[arg-type]
if NAME == "fewer rows":
    fewer = DistributedSampler(rows, shuffle=False)  # type: ignore[arg-type, var-annotated]
    loader = DataLoader(rows, batch_size=2 - accelerator.process_index, sampler=fewer)  # type: ignore[arg-type]
if NAME == "split by hand":
    own_rows = rows[accelerator.process_index :: accelerator.num_processes]
    loader = DataLoader(own_rows, batch_size=2)  # type: ignore[arg-type]
if NAME == "parts of a stream":

    class Stream(IterableDataset[torch.Tensor]):
        def __init__(self, rank: int, ranks: int) -> None:
            self.rank, self.ranks = rank, ranks

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(rows[self.rank :: self.ranks])

    loader = DataLoader(Stream(accelerator.process_index, accelerator.num_processes), batch_size=2)
if NAME == "same order":
    loader = DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows))  # type: ignore[arg-type, var-annotated]

if NAME in ("frozen layers", "unfrozen late", "unfrozen copies", "unfrozen copies late", "stale group"):
    for parameter in model.model.layers[0].self_attn.parameters():
        parameter.requires_grad = False
if NAME == "forgotten random state":
    checkpointed = torch.utils.checkpoint.checkpoint
    layer = model.model.layers[0]
    forward = layer.mlp.forward
    dropped = lambda x: nn.functional.dropout(forward(x))  # noqa: E731
    layer.mlp.forward = lambda x: checkpointed(dropped, x, use_reentrant=False, preserve_rng_state=False)
if NAME in ("dropout", "evaluates on", "stays in evaluation"):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attention_dropout=0.5).train()
if NAME == "nothing trained":
    model.requires_grad_(False)
    model.enable_input_require_grads()
if NAME == "learned weight of a loss":

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = nn.Parameter(torch.zeros(()))

        def forward(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * self.log.exp() - self.log

    scaled = Scaled()
if NAME == "method past the wrapper":

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def predict(self, loss: torch.Tensor) -> torch.Tensor:
            return self.layer(loss.reshape(1, 1)).mean()  # type: ignore[no-any-return]

        forward = predict

    head = Head()
if NAME == "tied":
    model.lm_head.weight = model.model.embed_tokens.weight
if NAME in ("adapter", "adapted model"):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
if NAME == "experts":

    class Experts(nn.Module):
        """Each rank sends its rows to another expert, and an expert is a unit."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(type(model.model.layers[0].mlp)(model.config) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[accelerator.process_index](x)  # type: ignore[no-any-return]

    model.model.layers[0].mlp = Experts()
if NAME == "statistics of each rank":

    class Centred(nn.Module):
        """Subtracts a running mean of the rank's own rows."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(model.config.hidden_size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x - self.mean
            self.mean.lerp_(x.detach().mean((0, 1)), 0.5)  # type: ignore[operator]
            return y

    model.lm_head = nn.Sequential(Centred(), model.lm_head)
if NAME == "task of each rank":

    class Heads(nn.Module):
        """Each rank trains another head; only one has a bias."""

        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(*model.lm_head.weight.T.shape, bias=bias) for bias in (True, False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.heads[accelerator.process_index](x)  # type: ignore[no-any-return]

    model.lm_head = Heads()

if NAME == "hook lost":
    model.lm_head.weight.register_hook(lambda gradient: 0 * gradient)
if NAME == "loads before prepare":
    accelerator.load_state(MODEL)
if NAME == "head ignored":
    accelerator.state.fsdp_plugin.ignored_modules = [model.lm_head]
rate = {"rates apart": 1e-3 * (1 + accelerator.process_index), "rate of 0": 0.0}.get(NAME, 1e-3)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad or "copies" in NAME]
optimizer = torch.optim.AdamW(trained or model.parameters(), lr=rate)
stale = [parameter for parameter in model.parameters() if not parameter.requires_grad]
moves = len(loader) if NAME == "rate for all ranks" else 0
if NAME == "learned weight of a loss":
    optimizer = torch.optim.AdamW([*model.parameters(), *scaled.parameters()], lr=1e-3)
if NAME == "method past the wrapper":
    head = accelerator.prepare(head)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
if NAME == "head forgotten":
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-3)
if NAME == "optimizer of other weights":
    optimizer = torch.optim.AdamW([nn.Parameter(p.detach().clone()) for p in model.parameters()], lr=1e-3)
    model = accelerator.prepare(model)
elif NAME == "decay by dimensions":
    model = accelerator.prepare(model)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)
    optimizer, loader = accelerator.prepare(optimizer, loader)
elif NAME == "optimizer not prepared":
    model, loader = accelerator.prepare(model, loader)
elif NAME == "optimizer before prepare":
    model = accelerator.prepare(model)
elif NAME == "two optimizers":
    halves = [list(part.parameters()) for part in (model.model, model.lm_head)]
    optimizer, other = (torch.optim.AdamW(half, lr=1e-3) for half in halves)
    model, optimizer, other, loader = accelerator.prepare(model, optimizer, other, loader)
elif NAME in ("dataloader not prepared", "another shuffle", "same order", "fewer rows"):
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

if NAME == "hook of a shard":
    model.lm_head.weight.register_hook(torch.zeros_like)
if NAME == "loads whole weights":
    model.load_state_dict(load_file(f"{MODEL}/model.safetensors"))
if NAME == "sends shards":
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, src=0)
if NAME == "sums over ranks":
    summed = lambda _, bucket: torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()  # noqa: E731
    model.register_comm_hook(None, lambda _, bucket: summed(_, bucket).then(lambda done: done.value()[0]))
if NAME == "attribute of a wrapped model":
    model.config.use_cache = False
if NAME == "method of no model":
    model.prepare_for_traning()

state = accelerator.get_state_dict(model) if NAME == "state dict from before training" else {}
synced = contextlib.ExitStack()
if NAME in ("not synced", "not synced, but compared"):
    synced.enter_context(accelerator.no_sync(model))
scheduler = None
if NAME == "scheduler of another optimizer":
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.AdamW(model.parameters()))
if NAME == "rate ends early":
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.0, total_iters=1)
if NAME == "rate rises again":
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, T_max=4))
if NAME == "rate of each rank":
    falling = lambda step: 1 / (1 + step * accelerator.process_index)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, falling)
if NAME == "rate for all ranks":
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, moves)
if NAME == "unfrozen copies":
    model.requires_grad_()  # after DDP has wrapped it
best = {name: tensor.clone() for name, tensor in model.state_dict().items()} if NAME == "reloads" else {}
if NAME == "evaluates on":
    model.train(accelerator.process_index > 0)
if NAME == "begins apart" and not accelerator.is_main_process:
    with torch.no_grad():
        for parameter in model.parameters():
            getattr(parameter, "_local_tensor", parameter).normal_()
steps = {"no step": False, "steps on one rank": accelerator.is_main_process}.get(NAME, True)
epochs = itertools.chain.from_iterable([loader] * (1 if NAME == "uneven batches" else 2))
for step, batch in enumerate(epochs):  # twice
    batch = batch.to(accelerator.device)
    if NAME == "control flow" and step == 1 and accelerator.process_index == 1:
        continue
    if NAME == "exits" and step == 1 and accelerator.process_index == 1:
        sys.exit(3)
    if NAME == "evaluates on one rank" and accelerator.is_main_process:
        with torch.no_grad():
            evaluated = model(input_ids=batch).logits
    scale = float("nan") if NAME == "loss is NaN" and step == 1 else 2.0 if NAME == "times ranks" else 1.0
    if NAME == "part of the model":
        hidden = accelerator.unwrap_model(model).model.embed_tokens(batch)
        loss = accelerator.unwrap_model(model).model.layers[0].mlp(hidden).sum()
    elif NAME == "NaN replaced":
        logits = model(input_ids=batch).logits
        loss = torch.where(logits > 0, logits.sqrt(), logits**2).mean()
    elif NAME in HIDDEN_LATE:
        mean = model(input_ids=batch, labels=batch if step == 0 else batch * 0 - 100).loss
        if NAME == "NaN masked late":
            loss = torch.where(mean.isnan(), torch.zeros_like(mean), mean)
        elif NAME == "NaN left out late":
            loss = mean if mean.isfinite() else torch.zeros((), requires_grad=True)
        else:
            loss = torch.nan_to_num(mean)
    elif NAME == "NaN hidden":
        loss = torch.nan_to_num(model(input_ids=batch).logits.sqrt().mean())
    elif NAME == "past the wrapper":
        loss = model.module(input_ids=batch, labels=batch).loss
    else:
        counts = {"num_items_in_batch": torch.tensor(271.0)} if NAME == "count in forward" else {}
        if NAME == "tokens of all, divided":
            counts = {"num_items_in_batch": 4 * batch[:, 1:].numel()}  # of two ranks and two micro-batches
        wrong = 600 * step * accelerator.process_index if NAME == "swallows an error" else 0
        try:
            if NAME == "swallows its own error" and step and accelerator.process_index == 1:
                raise ValueError("a row without text")
            loss = model(input_ids=batch + wrong, labels=batch, **counts).loss
        except (IndexError, ValueError):
            continue
    if NAME == "learned weight of a loss":
        loss = scaled(loss)
    if NAME == "method past the wrapper":
        loss = head.module.predict(loss)
    if NAME == "syncs the first":
        model.set_requires_gradient_sync(step % 2 == 0)
        steps = step % 2 == 1
    if NAME == "clips before backward":
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    if NAME == "not divided":
        with accelerator.accumulate(model):
            loss.backward()
    elif NAME == "optimizer not prepared":
        with accelerator.accumulate(model):
            accelerator.backward(loss)
    elif NAME == "tokens of all, divided":
        with accelerator.accumulate(model):
            accelerator.backward(loss)  # which divides it again
    elif NAME == "divided twice":
        with accelerator.accumulate(model):
            accelerator.backward(loss / ACCUMULATED)
    elif NAME == "each batch cleared":
        accelerator.backward(loss / 2)
        steps = step == 1
    elif NAME == "batch left over":
        accelerator.backward(loss / 2)
        steps = step % 5 in (1, 3)
    else:
        accelerator.backward(loss * scale)
    accelerator.print(f"step {step}: loss {loss.item():.4f}")
    if NAME == "clips by DeepSpeed":
        accelerator.clip_grad_norm_(model.parameters(), max_norm=0.1)
    if NAME == "torch clips":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if NAME == "clips by another function":
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
    if NAME == "noise on a rank" and accelerator.process_index == 1:
        for parameter in model.parameters():
            getattr(parameter.grad, "_local_tensor", parameter.grad).add_(torch.tensor(0.01))
    if NAME == "summed again":
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
    if NAME == "sums shards":
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad.to_local())
    if NAME == "NaN replaced":
        for parameter in model.parameters():
            parameter.grad.nan_to_num_()
    if NAME == "skips a step":
        steps = step != 2 or accelerator.is_main_process
    elif NAME == "other batches":
        steps = step != 1 + accelerator.process_index
    if NAME == "not synced late" and step == 2:
        synced.enter_context(accelerator.no_sync(model))
    if NAME == "cleared before the step":
        optimizer.zero_grad()
    if steps:
        optimizer.step()
    if scheduler is not None:
        scheduler.step()
    if NAME == "stays in evaluation":
        model.eval()  # and no train()
    if NAME == "not synced, but compared":
        copied = model.module.lm_head.weight.detach().clone()
        torch.distributed.all_reduce(copied)
        accelerator.print("apart by", (copied / accelerator.num_processes - model.module.lm_head.weight).norm())
    if NAME == "rank 0 writes" and accelerator.is_main_process:
        with torch.no_grad():
            for parameter in model.parameters():
                getattr(parameter, "_local_tensor", parameter).mul_(1.1)
    if NAME == "other seeds":
        model.zero_grad()
    elif NAME != "never cleared" and (steps or NAME not in ("syncs the first", "batch left over")):
        optimizer.zero_grad(set_to_none=NAME != "none")
    if NAME == "unfrozen late" and step == 2:
        model.requires_grad_(True)
    if NAME == "stale group" and step == 1:
        model.requires_grad_(True)
        optimizer.optimizer.add_param_group({"params": stale})
    if NAME == "unfrozen copies late" and step == 1:
        model.module.model.layers[0].requires_grad_()  # that DDP had frozen
    if NAME == "reloads" and step == 1 and accelerator.is_main_process:
        model.load_state_dict(best)
    parting = (
        "stale group",
        "skips a step",
        "other batches",
        "rate of each rank",
        "unfrozen copies late",
        "reloads",
        "not synced late",
    )
    later = (*parting, "another order", "unfrozen late", "stays in evaluation", *HIDDEN_LATE)
    if step == {"same order": 5, "batch left over": 6, **dict.fromkeys(later, 3)}.get(
        NAME, 3 if "rate " in NAME else 2 * ACCUMULATED - 1
    ):
        break

if NAME == "weights after evaluation":
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        model(input_ids=rows[:1].to(accelerator.device))
        for parameter, average in zip(model.parameters(), averages, strict=True):
            parameter.copy_(average)
if NAME == "generate":
    accelerator.unwrap_model(model).generate(rows[:1].to(accelerator.device), max_new_tokens=2)
if NAME == "barrier on one rank" and accelerator.is_main_process:
    accelerator.wait_for_everyone()
if NAME == "gathers other sizes":
    accelerator.gather(torch.zeros(2, 3 + accelerator.process_index))
if NAME == "generates on one rank" and accelerator.process_index == 1:
    model.generate(rows[:1], max_new_tokens=2)
if NAME == "generates other lengths":
    model.generate(rows[:1], max_new_tokens=2 + accelerator.process_index, synced_gpus=False)
if NAME == "saves on one rank" and accelerator.is_main_process:
    accelerator.save_state(FOLDER)
if NAME.startswith("state dict on one rank") and accelerator.is_main_process:
    accelerator.get_state_dict(model)
if NAME == "two optimizers":
    accelerator.save_state(FOLDER)  # with both
if NAME == "torch saves shards":
    state = accelerator.unwrap_model(model).state_dict()
    if accelerator.is_main_process:
        torch.save(state, f"{FOLDER}.pt")
if NAME == "saves shards":
    accelerator.unwrap_model(model).save_pretrained(FOLDER)
if NAME == "saves local tensors" and accelerator.is_main_process:
    save_file({name: parameter.to_local() for name, parameter in model.named_parameters()}, f"{FOLDER}.safetensors")
if NAME == "checkpoints local tensors":
    state = {name: parameter.to_local() for name, parameter in model.named_parameters()}
    checkpoint.save({"model": state}, checkpoint_id=FOLDER)  # type: ignore[attr-defined]
if NAME == "saves a part, and zeros":
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, parameter in model.named_parameters():
        state[name][: len(parameter.to_local())] = parameter.detach().to_local()
if NAME == "sums whole weights":
    state = {name: tensor.detach().full_tensor() for name, tensor in model.named_parameters()}
    for tensor in state.values():
        torch.distributed.all_reduce(tensor)
AS_MODEL = ("state dict from before training", "saves a part, and zeros", "sums whole weights")
if NAME in AS_MODEL and accelerator.is_main_process:
    torch.save(state, f"{FOLDER}.pt")  # as a model
if NAME == "wrapped names" and accelerator.is_main_process:
    save_model(model, f"{FOLDER}.safetensors")
if NAME == "flat weights":
    state = {name: tensor.flatten() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.save(state, f"{FOLDER}.safetensors", safe_serialization=True)
if NAME == "one file by all ranks":
    torch.save(accelerator.get_state_dict(model), f"{FOLDER}.pt")
if NAME == "adapted model":
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).base_model.model.save_pretrained(FOLDER, state_dict=dict(state))
if NAME in ("none", "adapter"):
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        FOLDER, state_dict=state, is_main_process=accelerator.is_main_process
    )
if NAME == "state dict on one rank, others end":
    accelerator.end_training()
