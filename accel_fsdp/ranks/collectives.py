"""The collectives that this rank has called, from torch's record of them, and the script's lines that called them."""

import contextlib
import os
import pickle
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_fsdp.ranks import events, script
from accel_fsdp.ranks.events import RankEvent

NAMES: Mapping[str, str] = {
    **dict.fromkeys(("wait_for_everyone", "barrier", "monitored_barrier"), "barrier"),
    **dict.fromkeys(("save_state", "save_model", "save_pretrained", "get_state_dict", "state_dict"), "save"),
    **dict.fromkeys(("get_model_state_dict", "get_optimizer_state_dict", "optim_state_dict", "async_save"), "save"),
    **dict.fromkeys(("gather", "gather_for_metrics", "gather_object", "reduce", "pad_across_processes"), "gather"),
    **dict.fromkeys(("all_gather", "all_gather_object", "all_gather_into_tensor", "all_reduce"), "gather"),
    **dict.fromkeys(("broadcast", "broadcast_object_list", "full_tensor"), "gather"),
    **dict.fromkeys(("_call_impl", "_wrapped_call_impl", "forward", "evaluate", "predict"), "forward"),
    **{name: name for name in ("generate", "backward", "prepare")},
    **dict.fromkeys(("step", "clip_grad_norm_"), "step"),
}
"""Functions that call collectives for a script, and the kind of each."""


class Call(NamedTuple):
    """A collective of a process group. `lines` are the script's, outermost first; none in calls after its end."""

    group: str
    number: int
    name: str
    call: str
    """The function that the script's line calls, or the collective."""
    lines: list[str]
    sizes: list[list[int]]

    @property
    def kind(self) -> str:
        return NAMES.get(self.call, "gather")

    @property
    def function(self) -> str:
        return "the model" if self.call.endswith(("_call_impl", "forward")) else self.call


def aborted(folder: Path, script_file: Path) -> list[RankEvent]:
    """An event for each rank whose process a library aborted, with the call that the script was in."""
    results = []
    project = os.path.dirname(os.path.abspath(script_file))
    for path in folder.glob(f"*{events.ABORTED}"):
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', path.read_text(encoding="utf-8", errors="replace"))
        own = [number for number, (file, *_) in enumerate(frames) if os.path.dirname(file) == project]
        if own:
            places = [(os.path.basename(frames[number][0]), frames[number][1]) for number in reversed(own)]
            lines = [f"{script_file.parent / file}:{line}" for file, line in places]
            call = _called_function([name for *_, name in frames[: own[0]]], "a collective")
            content = {"calls": [Call("", 0, "", call, lines, [])._asdict()]}
            results.append(RankEvent(int(path.name.partition(".")[0]), time.monotonic(), "aborted", content))
    return results


def _called_function(names: Sequence[str], collective: str) -> str:
    """The function of `names` (innermost first) that the script's line calls; the collective if none is known."""
    return next((name for name in reversed(names) if name in NAMES), collective)


def report() -> None:
    """Reports the latest calls, up to the 2,000 that torch records."""
    with contextlib.suppress(Exception):  # what torch records is not documented
        events.report("calls", calls=[call._asdict() for call in _calls()])


def calls_of(event: RankEvent) -> list[Call]:
    return [Call(**call) for call in event.content["calls"]]


def _calls() -> list[Call]:
    from torch._C import _distributed_c10d as recorder

    with _without_inductor():
        dump = vars(recorder)["_dump_fr_trace"]()
    return [_call(entry) for entry in pickle.loads(dump).get("entries", ()) if not entry.get("is_p2p")]


def _call(entry: Mapping[str, Any]) -> Call:
    frames = entry.get("frames") or []  # innermost first
    own = [number for number, frame in enumerate(frames) if script.is_own(frame["filename"])]
    lines = [script.line_of([(frames[number]["filename"], frames[number]["line"])]) for number in reversed(own)]
    inner = [str(frame["name"]) for frame in (frames[: own[0]] if own else frames)]
    collective = str(entry["profiling_name"]).rpartition(":")[2]
    call = _called_function(inner, collective)
    sizes = [list(size) for size in entry.get("input_sizes", ())]
    return Call(str(entry["process_group"][0]), int(entry["collective_seq_id"]), collective, call, lines, sizes)


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Keeps torch from importing its compiler, which takes seconds, to name frames of compiled code (2.13)."""
    import torch

    names = vars(torch)
    is_absent = "_inductor" not in names and "torch._inductor" not in sys.modules
    if is_absent:
        names["_inductor"] = None
    try:
        yield
    finally:
        if is_absent and names.get("_inductor") is None:
            names.pop("_inductor", None)
