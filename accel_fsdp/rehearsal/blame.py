"""Finds the cause of a failure: the line of the script, and the key or argument that is known to cause it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from accel_fsdp.config import JobConfig
from accel_fsdp.job import Job
from accel_fsdp.ranks import Holding, RankEvent, calls_of, is_alone
from accel_fsdp.rehearsal import absent, verdict
from accel_fsdp.rehearsal.job import CONSEQUENCE, Hang, Outcome, left_alone
from accel_fsdp.rehearsal.scaled import machines_of

SCRIPT = "the script"
"""The key of failures that the YAML can't fix."""


class Failure(Exception):
    """A step that failed. `key` is the YAML's key or the script's argument that caused it, `line` the script's line."""

    def __init__(self, what: str, key: str = "", fix: str = "", line: str = "", output: str = "") -> None:
        super().__init__(what)
        self.what, self.key, self.fix, self.line, self.output = what, key, fix, line, output


def mistake(what: str, fix: str, line: str = "") -> Failure:
    """A failure that the script causes, so that no key of the YAML can fix it."""
    return Failure(what, SCRIPT, fix, line)


@dataclass(frozen=True)
class Cause:
    """A library's message and its cause; `at` is a line of the traceback, if the message alone is ambiguous."""

    message: str
    key: str
    fix: str
    at: str = ""


ONE_OPTIMIZER = (
    "one optimizer with several groups of parameters, AdamW([{'params': ...}, ...]): Accelerate saves each optimizer "
    "with a separate model"
)
KNOWN = (
    Cause(
        "Could not find the transformer layer class",
        "fsdp_transformer_layer_cls_to_wrap",
        "name a layer class that the model has: accel-fsdp check FILE --model MODEL",
    ),
    Cause(
        r"Must flatten tensors with uniform .?requires_grad",
        "fsdp_use_orig_params",
        "fsdp_use_orig_params: true, or fsdp_version: 2",
    ),
    Cause(
        r"Must flatten tensors with uniform dtype|FSDP expects uniform original parameter dtype",
        "mixed_precision",
        "load the model in one dtype: --dtype float32",
    ),
    Cause(
        "fully_shard does not support containers",
        "fsdp_auto_wrap_policy",
        "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
    ),
    Cause(
        "different number of metadata|Recomputed values for the following tensors have different metadata",
        "--gradient_checkpointing",
        "layers that do the same when they run again: no dropout of their own, no state",
    ),
    Cause(
        r"in loading state_dict for [\s\S]*got mixed torch.Tensor and DTensor",
        SCRIPT,
        "load whole weights before accelerator.prepare; or torch.distributed.checkpoint.state_dict."
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))",
    ),
    Cause(
        r"aten\.(copy|lerp|add|sub|mul)_\.\w+ got mixed torch.Tensor and DTensor",
        SCRIPT,
        "after evaluation some units stay whole until the next backward pass: call reshard() of each FSDPModule in "
        "model.modules() before weights are read or changed",
    ),
    Cause(
        "in the optimizer couldn't be switched to its sharded version",
        SCRIPT,
        "give the optimizer only weights of the model that prepare gets in the same call: move others, such as learned "
        "weights of a loss, into this model, so that FSDP shards them and averages their gradients",
    ),
    Cause(r"is not in the optimizer state\. The FSDPParamInfo", SCRIPT, ONE_OPTIMIZER),
    Cause("IndexError: list index out of range", SCRIPT, ONE_OPTIMIZER, at=r"_fsdp_optimizer\(.*_models\[i\]"),
    Cause(
        r"got mixed torch.Tensor and DTensor|'weight' must be 2-D|size mismatch, got input"
        r"|must be at least 1-dimensional|Expected weight to be 2-D|weight should have at least",
        SCRIPT,
        "call the whole model: a part of it, or generate, sees shards, as FSDP gathers in the hooks of its units. Or "
        "two units share a weight: leave embedding and head in one",
    ),
    Cause(
        r"The size of tensor a \(\d+\) must match the size of tensor b",
        SCRIPT,
        "leave no_sync before the last micro-batch of a step: in it gradients stay whole, and weights are shards",
        at=r"torch/optim/(adam|adamw|sgd|rmsprop)\.py",  # Adagrad creates its states before FSDP shards the parameters
    ),
    Cause(
        "data pointer on an invalid python storage",
        SCRIPT,
        "the weights are shards: on all ranks, model.save_pretrained(folder, "
        "state_dict=accelerator.get_state_dict(model)) of the unwrapped model",
    ),
    Cause(
        "fp16 mixed precision requires a GPU",
        "mixed_precision",
        "mixed_precision: bf16 in a rehearsal, as fp16 scales losses on GPUs alone",
    ),
    Cause(
        r"'(DistributedDataParallel|FullyShardedDataParallel|DeepSpeedEngine)' object has no attribute",
        SCRIPT,
        "the model inside of the wrapper may have it: accelerator.unwrap_model(model)",
    ),
    Cause("--tf32 requires", "--tf32", "leave out --tf32 in a rehearsal: it chooses kernels of GPUs"),
    Cause(
        r"Flash ?Attention ?[234]",
        "attn_implementation",
        "attn_implementation sdpa in a rehearsal: Flash Attention is a kernel of GPUs",
    ),
    Cause(
        r"is shared with a parameter already managed|Invariant encountered: value was None when it should not be",
        "fsdp_transformer_layer_cls_to_wrap",
        "leave the modules that share a weight, such as embedding and head, in one unit; or fsdp_version: 1, where "
        "Accelerate itself makes a unit of the head, as of BERT's, whose bias is shared",
    ),
)
"""Known problems that only a run shows."""
WITHOUT_GPU = re.compile(
    r"Torch not compiled with \w+ enabled|No CUDA GPUs are available|Found no NVIDIA driver|invalid device ordinal"
    r"|Cannot access accelerator device when none is available|compiled without CUDA|requires CUDA support|CUDA error:"
    r"|CUDA driver initialization failed|invalid argument to reset_|NVTX functions not installed|'_cuda_\w+'"
    r"|not linked with support for cuda|dummy base class|Cannot get CUDA generator|object on a CUDA device|NCCL|nccl"
)
"""torch's errors without a GPU, in builds with and without CUDA."""
SKIP = 'skip it where the weights are on a CPU: if next(model.parameters()).device.type == "cuda":'
MORE_RANKS = "see why it ends there; if it counts GPUs, --processes N: it sees as many as ranks, and by default two"
OF_PYTHON = re.compile(r"(AttributeError|TypeError|NameError|UnboundLocalError):")
"""Python's errors for slips in a script."""
OWN_ERROR = re.compile(r"^error: (?P<what>.+)\n  why: (?P<why>.+)\n  fix: (?P<fix>.+)$", re.MULTILINE)
"""Exit codes of this project's programs."""
BY_HAND = (
    "the script shards the model itself, otherwise than the YAML says: see which modules, ranks and strategy it names"
)
OTHER_SIZE = "Received data size doesn't match expected size"
"""Gloo's words before it aborts a rank; the other ranks may have ended well."""
ABSENT = "this rank never reaches the collective that the others wait in: see why it stays at this line"


def judge(job: JobConfig, classes: tuple[str, ...], outcome: Outcome, experts: int = 1) -> None:
    expected = verdict.of_job(job, job.number("num_processes"), machines_of(job), classes, experts)
    for failure in differences(expected, outcome.holdings, outcome.events):
        raise failure


def differences(expected: Job, holdings: Mapping[int, Holding], events: Sequence[RankEvent]) -> Iterator[Failure]:
    """Yields differences between what the ranks hold and what is expected, the most serious first."""
    lines = {event.kind: str(event.content["line"]) for event in reversed(events) if event.kind in ("wrapped", "step")}
    alone = (event.content for event in events if event.kind == "stepped" and is_alone(event))
    called_at = next((str(content["line"]) for content in alone), "")
    is_by_hand = "wrapped" in lines and not any(event.kind == "prepared" for event in events)
    combines = not expected.layout.is_sharded and any(event.kind == "combines" for event in events)
    for difference in verdict.differences(expected, holdings):
        if combines and difference.fix == verdict.WRAPPED:  # the script may average gradients or weights
            continue
        if not difference.key:
            line = called_at if difference.fix == verdict.WRAPPED else lines.get("step", "")
            yield Failure(difference.what, key=SCRIPT, fix=difference.fix, line=line)
        elif is_by_hand:
            yield Failure(difference.what, key=SCRIPT, fix=BY_HAND, line=lines["wrapped"])
        else:
            yield Failure(difference.what, key=difference.key, fix="see what accel-fsdp check says of it")


def of_outcome(outcome: Outcome) -> Failure:
    if hang := outcome.hang or left_alone(outcome.events):
        return of_hang(hang, outcome.events, outcome.tail)
    failures = [event.content for event in outcome.of("failed")]
    failure = next((content for content in failures if not CONSEQUENCE.search(content["error"])), None)
    if failure is None and (own_error := OWN_ERROR.search(outcome.output)):
        return Failure(f"{own_error['what']}: {own_error['why']}", fix=own_error["fix"], output=outcome.tail)
    end = next((event for event in outcome.of("ended") if event.content["code"]), None)
    if failure is None and failures and end:
        what = f"rank {end.rank} ended itself with exit code {end.content['code']}, and the others wait for it"
        fix = "see why only this rank reaches this line"
        return Failure(what, key=SCRIPT, fix=fix, line=end.content["line"], output=outcome.tail)
    if failure is None and not end and (missing := absent.absence(outcome.events)):
        return Failure(missing.what, SCRIPT, missing.fix, missing.line, outcome.tail)
    aborted = next(iter(outcome.of("aborted")), None)
    if failure is None and aborted and OTHER_SIZE in outcome.output:
        call = calls_of(aborted)[0]
        what = f"{call.function} gets tensors of different sizes: rank {aborted.rank} is sent more than it waits for"
        return Failure(what, SCRIPT, absent.FIXES["sizes"], call.lines[-1], outcome.tail)
    failure = failure or next(iter(failures), None) or (end.content if end else {})
    return of_message(str(failure.get("error", "")), str(failure.get("line", "")), outcome)


def of_no_training(outcome: Outcome) -> Failure:
    """Why a script ended without a model."""
    line = next((str(event.content["line"]) for event in outcome.of("ended") if event.content["line"]), "")
    what = "the script ended itself before it trained a model" if line else "the script trained no model"
    return Failure(what, key=SCRIPT, line=line, fix=line and MORE_RANKS, output=outcome.tail)


def of_message(error: str, line: str, outcome: Outcome) -> Failure:
    """The failure for the error of the first rank, whose first line says what is wrong."""
    text = error or outcome.tail
    what = _first_words(error) if error else f"a rank ended with exit code {outcome.code}"
    if WITHOUT_GPU.search(error):
        what = "the script asks for a GPU, and a rehearsal has none"
        return Failure(what, key=SCRIPT, fix=SKIP, line=line, output=outcome.tail)
    for cause in KNOWN:
        if re.search(cause.message, text) and re.search(cause.at, outcome.output):
            return Failure(what, key=cause.key, fix=cause.fix, line=line, output=outcome.tail)
    return Failure(what, key=SCRIPT if line and OF_PYTHON.match(error) else "", line=line, output=outcome.tail)


def _first_words(error: str) -> str:
    """The first line of an error, with the next one if it ends with a colon."""
    first, *others = error.splitlines()
    return f"{first} {others[0].strip()}" if first.endswith(":") and others else first


def of_hang(hang: Hang, events: Sequence[RankEvent], tail: str = "") -> Failure:
    """The failure for a hang. `tail`: the last lines of the output, shown without stacks."""
    lines: Mapping[str, str] = {collective: line for line, collective, *_ in hang.waits.values() if line}
    line = lines.get("") or next(iter(lines.values()), "")  # a rank outside of collectives keeps the others waiting
    output = hang.stacks or tail
    if not hang.in_time:
        what, fix = "the launch took too long and was ended", "fewer steps or a smaller model, or more of --timeout"
        is_alone = "" in lines and (len(lines) > 1 or bool(hang.ended))
        key, fix = (SCRIPT, f"{ABSENT}; if it is only slow, {fix}") if is_alone else ("--timeout", fix)
        return Failure(f"{what}: {hang}" if hang.waits else what, key=key, fix=fix, line=line, output=output)
    if "" not in lines and (missing := absent.absence(events)):
        return Failure(f"{missing.what}: {hang}", key=SCRIPT, fix=missing.fix, line=missing.line, output=output)
    fix = ABSENT if "" in lines else absent.FIXES["gather"]
    return Failure(f"the ranks wait for each other: {hang}", key=SCRIPT, fix=fix, line=line, output=output)
