"""Repeats recorded updates in one plain process on rank 0, and compares gradients, clipping and steps with the ranks'.
Each part is repeated from the ranks' own state before it, so that differences don't add up: forward and backward passes
with the ranks' weights, the optimizers' steps with the ranks' gradients.
"""

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from accel_fsdp.config import LONG_DTYPES
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import cpu, events, loss_shares, parts, precision, script
from accel_fsdp.ranks.copies import restore_buffers
from accel_fsdp.ranks.holding import user_name
from accel_fsdp.ranks.outputs import tensors_in
from accel_fsdp.ranks.ratios import EXACT, differing_copies, factor, is_changed, norm, ratio
from accel_fsdp.ranks.recording import KNOWN_OPTIMIZERS, Recorder
from accel_fsdp.ranks.records import united
from accel_fsdp.waiting import comes_true

if TYPE_CHECKING:
    import torch
    from torch import nn

CLEAR = "zero_grad"
WAIT_SECONDS = 10.0
"""How long rank 0 waits for the records of the others, which have ended their scripts."""
ROUNDED = 0.35
"""As `EXACT`, of gradients in 16 bits, where FSDP also rounds what autocast leaves in float32: 1e-2 was measured for
most models, 0.08 for mixtures of experts, 0.11 for biases of GPT-2. A factor of 2 or 1/2 gives 1 or 0.5."""
ROUNDED_OUTPUTS = 0.1
"""How far apart the outputs of a forward pass may be in 16 bits; more comes from unrecorded state."""
FLOOR = 1e-2
"""Gradients that are smaller than this part of the largest one are compared with that part of it: they may be noise."""


Tensors: TypeAlias = "dict[str, torch.Tensor]"


class Unrepeatable(Exception):
    """Why an update can't be repeated, as a sentence."""


def compare(recorder: Recorder) -> None:
    """Called on each rank when the script has ended; rank 0 repeats the updates and reports differences."""
    import torch.distributed as dist

    recorder.end()
    launch = LaunchEnvironment.now()
    if dist.is_initialized():
        cpu.wait_for_others("records")
    if launch.rank != 0:
        return
    try:
        for number in range(recorder.written):
            _compare(recorder, number, _read(recorder.folder, number, launch.world_size))
        if not recorder.written:
            raise Unrepeatable("no forward pass of a model that was sharded led to a step of an optimizer")
    except Unrepeatable as problem:
        events.report("unrepeated", why=str(problem))
    except Exception as error:  # a model's own code may raise any error
        events.report("unrepeated", why=f"{type(error).__name__}: {error}")


def _compare(recorder: Recorder, number: int, updates: Sequence[dict[str, Any]]) -> None:
    """Repeats an update; the ranks' copies are compared even if it can't be."""
    try:
        _Repeated(recorder, number, updates).compare()
    except Unrepeatable:
        if content := differing_copies(updates, "reduced"):
            events.report("otherwise", what="other gradients", line=updates[0]["line"], **content)
        raise


def _read(folder: Path, number: int, ranks: int) -> list[dict[str, Any]]:
    import torch

    paths = [folder / f"{rank}.{number}" for rank in range(ranks)]
    if not comes_true(lambda: all(path.is_file() for path in paths), WAIT_SECONDS, every=0.05):
        missing = next(rank for rank, path in enumerate(paths) if not path.is_file())
        raise Unrepeatable(f"rank {missing} took fewer steps")
    return united([torch.load(path, weights_only=True) for path in paths])


class _Repeated:
    """One update of all ranks, `updates`; `with_rows` are those of ranks with different rows: one of each tp group."""

    def __init__(self, recorder: Recorder, number: int, updates: Sequence[dict[str, Any]]) -> None:
        self.number = number
        self.updates = updates
        self.with_rows = LaunchEnvironment.now().with_rows(updates)
        self.first = updates[0]
        if why := next((update["why"] for update in updates if update["why"]), ""):
            shares = loss_shares.of_batches(self.first["forwards"])
            if self.first["dropped"] and len(shares) > 1 and loss_shares.each(shares, 1 / len(shares)):
                self._report("dropped", script.nearest_line(self.first["line"], CLEAR), accumulation=len(shares))
            raise Unrepeatable(why)
        if self.first["precision"] == "fp8":
            raise Unrepeatable("autocast on a CPU has no fp8")
        copies = [kept.plain for kept in recorder.copies]
        used = {forward["model"] for update in updates for forward in update["forwards"]}
        model = copies[next(iter(used))] if len(used) == 1 else None
        if model is None:
            raise Unrepeatable("no model of it was copied before it was sharded")
        self.model: nn.Module = model
        self.precision, self.cast = str(self.first["precision"]), str(self.first["cast"])
        self.optimizers = recorder.optimizers[number]
        self.buffers = recorder.copies[next(iter(used))].buffers
        self.wrapped_at = recorder.wrapped_at
        self.weights = {user_name(path): weight for path, weight in model.named_parameters()}

    def compare(self) -> None:
        trained = self.first["trained"]
        if not trained:
            self._report("frozen", self._step_line)
            return
        if missing := next((name for name in trained if name not in self.weights), ""):
            raise Unrepeatable(f"the model had no {missing} before it was sharded")
        if self.first["unprepared"]:
            return self._report("unprepared", self._step_line)
        if not self.number and self.first["precision"] == "fp16" and not self.first["scaled"]:
            self._report("unscaled", self.first["line"])
        covered = set(self._stepped_names)
        reduced, used = self._whole_tensors("reduced"), self._whole_tensors("used")
        if content := differing_copies(self.updates, "weights"):
            self._report("other weights", self._step_line if self.number else self.wrapped_at, **content)
        if content := differing_copies(self.updates, "reduced"):
            is_ignored = content["name"] in self.first["unsharded"]
            line = self.wrapped_at if is_ignored else self.first["unsynced"] or self.first["line"]
            self._report("ignored" if is_ignored else "other gradients", line, **content)
        if hidden := next((name for name in used if not _finite(reduced.get(name)) and _finite(used[name])), ""):
            self._report("hidden", script.nearest_line(self._step_line, "nan_to_num"), name=hidden)
            return
        plain = self._gradients()
        if self.number:  # gradients of weights that no optimizer has accumulate over steps
            plain = {name: gradient for name, gradient in plain.items() if name in covered}
        worst = self._compare_gradients(reduced, {name: plain[name] for name in plain if name in {*reduced, *covered}})
        self._compare_clipping(reduced, used)
        if content := loss_shares.misdivided(self.first, len(self.with_rows)):
            self._report(line=self.first["line"], **content)
        if content := loss_shares.flaw(self.with_rows):
            self._report("counted", self.first["line"], **content)
        before, after = self._whole_tensors("weights"), self._whole_tensors("after")
        why = self._compare_steps(before, used, after)
        events.report(
            "repeated",
            update=self.number + 1,
            apart=worst,
            steps=why,
            cleared=bool(plain) and not any(bool(gradient.any()) for gradient in used.values()),
            idle=not any(bool(gradient.any()) for gradient in plain.values()),
            rates=[settings.get("lr") for step in self.first["steps"] for settings in step["settings"]],
            changed=any(map(is_changed, self.updates)),
            line=self._step_line,
            cleared_at=script.nearest_line(self._step_line, CLEAR) if any(g.any() for g in reduced.values()) else "",
        )

    @property
    def exact(self) -> bool:
        import torch

        full = all(weight.dtype == torch.float32 for weight in self.weights.values() if weight.is_floating_point())
        return full and {self.first[name] for name in ("precision", "cast", "reduces")} == {"no"}

    @property
    def _step_line(self) -> str:
        return str(self.first["steps"][-1]["line"])

    @property
    def _stepped_names(self) -> list[str]:
        return [name for step in self.first["steps"] for names in step["names"] for name in names]

    def _report(self, what: str, line: str, **content: Any) -> None:
        events.report("otherwise", what=what, update=self.number + 1, line=line, **content)

    def _whole_tensors(self, kind: str) -> Tensors:
        of_ranks = [update[kind] for update in self.updates]
        names = {name: None for rank_parts in of_ranks for name in rank_parts}
        wholes = {name: parts.whole(self.weights[name].shape, name, of_ranks) for name in names if name in self.weights}
        return {name: tensor for name, tensor in wholes.items() if tensor is not None}

    def _gradients(self) -> Tensors:
        """The plain model's gradients: of the mean over ranks of the sum over their micro-batches, or by a divisor."""
        import torch

        values = self._whole_tensors("weights")
        trained = set(self.first["trained"])
        with torch.no_grad():
            for name, weight in self.weights.items():
                if name in values:
                    weight.copy_(precision.rounded(values[name], self.cast))
        for name, weight in self.weights.items():
            weight.requires_grad_(name in trained and weight.is_floating_point())
            weight.grad = None
        state = torch.get_rng_state()
        try:
            with _alone():
                for update in self.with_rows:
                    for forward in update["forwards"]:
                        self._repeat(forward)
        finally:
            torch.set_rng_state(state)
        divisor = self.first["divisor"] or len(self.with_rows)
        gradients = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        return {name: gradient.float() / divisor for name, gradient in gradients.items()}

    def _repeat(self, forward: Mapping[str, Any]) -> None:
        import torch

        if not any(gradient is not None for gradient in forward["gradients"]):
            return
        module = self.model.get_submodule(forward["module"]) if forward["module"] else self.model
        args, kwargs = forward["inputs"]
        with torch.enable_grad(), self._as_recorded(module, forward):
            result = module(*args, **kwargs)
        outputs = list(tensors_in(result))
        if len(outputs) != len(forward["gradients"]):
            raise Unrepeatable("the model returns other outputs when it isn't sharded")
        tolerance = EXACT if self.exact else ROUNDED_OUTPUTS
        for number, value in forward["outputs"].items():
            if norm(outputs[number].detach() - value) > tolerance * norm(value):
                raise Unrepeatable(
                    "the forward pass gives other values there: it depends on more than inputs, weights, buffers"
                )
        pairs = [
            (output, gradient.to(output.dtype).reshape(output.shape))
            for output, gradient in zip(outputs, forward["gradients"], strict=True)
            if gradient is not None and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])

    def _as_recorded(self, module: "nn.Module", forward: Mapping[str, Any]) -> "torch.autocast":
        """Sets the modes and random numbers of a forward pass; returns the context of its precision."""
        import torch

        evaluating = set(forward["evaluating"])
        for path, part in module.named_modules():
            part.training = user_name(path) not in evaluating
        restore_buffers(self.model, self.buffers, forward["buffers"])
        torch.set_rng_state(forward["random"])
        dtype = getattr(torch, LONG_DTYPES[self.precision]) if self.precision in LONG_DTYPES else None
        return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def _compare_gradients(self, reduced: Tensors, plain: Tensors) -> float:
        """The largest relative difference of a gradient, which is reported if it is too large."""
        if not plain:
            raise Unrepeatable("no gradient came back to the model's outputs")
        largest = max(norm(gradient) for gradient in plain.values())
        tolerance = EXACT if self.exact else ROUNDED
        worst, worst_name = 0.0, ""
        for name, gradient in plain.items():
            on_ranks = reduced.get(name)
            scale = max(norm(gradient), FLOOR * largest) or 1.0  # if all are 0
            deviation = norm(gradient - (on_ranks.float() if on_ranks is not None else 0)) / scale
            if deviation > worst or math.isnan(deviation):
                worst, worst_name = deviation, name
        if not worst <= tolerance:
            on_ranks = reduced.get(worst_name)
            own_ratio = 0.0 if on_ranks is None else ratio({worst_name: on_ranks}, {worst_name: plain[worst_name]})
            self._report(
                "gradient",
                self.first["unsynced"] or self.first["line"],
                kept=bool(self.first["unsynced"]),
                name=worst_name,
                apart=worst,
                ratio=own_ratio,
                all=ratio(reduced, plain),
                ranks=len(self.with_rows),
                accumulation=len(self.first["forwards"]),
            )
        return worst

    def _compare_clipping(self, reduced: Tensors, used: Tensors) -> None:
        """Compares the factor between reduced and used gradients on all ranks, and with the requested norm."""
        clips = self.first["clips"]
        if clips and not any(clip["backwards"] for clip in clips):
            self._report("clipped-early", clips[0]["line"])
            return
        factors = {rank: factor(update["reduced"], update["used"]) for rank, update in enumerate(self.updates)}
        known = {rank: value for rank, value in factors.items() if value is not None}
        if not known:
            return
        if len(clips) != 1 or used.keys() != reduced.keys():
            clips = []
        lowest, highest = (choose(known, key=lambda rank: known[rank]) for choose in (min, max))
        if known[highest] - known[lowest] > EXACT * known[highest]:
            line = clips[-1]["line"] if clips else self._step_line
            self._report("clipped-apart", line, factors=[known[lowest], known[highest]], ranks=[lowest, highest])
            return
        is_summed = len(factors) > 1 and math.isclose(known[lowest], len(factors), rel_tol=EXACT)
        if is_summed and not clips:
            self._report("summed-again", self._step_line, ranks=len(factors))
        if not clips or len(known) < len(factors) or clips[-1]["norm"] != 2:
            return
        total = math.sqrt(sum(norm(gradient) ** 2 for gradient in reduced.values()))
        expected = min(1.0, clips[-1]["most"] / (total + 1e-6))
        if abs(expected - known[lowest]) > 10 * EXACT * expected:
            self._report("clipped-otherwise", clips[-1]["line"], factors=[known[lowest], expected])

    def _compare_steps(self, before: Tensors, used: Tensors, after: Tensors) -> str:
        """Repeats each optimizer's step with the gradients that it used; returns why it can't, or an empty text."""
        for index, (step, optimizer) in enumerate(zip(self.first["steps"], self.optimizers, strict=False)):
            kind = type(optimizer)
            if step["has_hooks"] or len(self._stepped_names) > len(set(self._stepped_names)):
                return f"{kind.__name__} has hooks, or steps more than once"
            if not f"{kind.__module__}.".startswith(KNOWN_OPTIMIZERS):
                return f"{kind.__name__} is not an optimizer of torch or transformers"
            states = [update["steps"][index]["states"] for update in self.updates]
            try:
                changed = _stepped(kind, optimizer.defaults, step, states, before, used)
            except Exception as error:  # an optimizer's own code may raise any error
                return f"{kind.__name__}: {type(error).__name__}: {error}"
            for name, weight in changed.items():
                change, expected = after[name].float() - before[name].float(), weight.float() - before[name].float()
                size = max(norm(expected), 1e-6 * norm(before[name]))
                if size and (difference := norm(change - expected) / size) > 10 * EXACT:
                    self._report("step", step["line"], name=name, apart=difference, optimizer=kind.__name__)
                    return ""
        return ""


def _finite(tensor: "torch.Tensor | None") -> bool:
    return tensor is None or bool(tensor.isfinite().all())


def _alone() -> contextlib.AbstractContextManager[Any]:
    """Raises `Unrepeatable` where code communicates with other ranks, which have ended their scripts."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class RefusedCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
                raise Unrepeatable("the model's forward communicates with other ranks")
            return func(*args, **(kwargs or {}))

    return RefusedCommunication()  # type: ignore[no-untyped-call]


def _stepped(
    kind: type[Any],
    defaults: Mapping[str, Any],
    step: Mapping[str, Any],
    states: Sequence[Mapping[str, Any]],
    before: Tensors,
    used: Tensors,
) -> Tensors:
    """The weights after one step of a new optimizer with the recorded settings, states and gradients."""
    import torch

    weights = {name: torch.nn.Parameter(before[name].clone()) for names in step["names"] for name in names}
    accepted = inspect.signature(kind).parameters
    groups = [{"params": [weights[name] for name in names]} for names in step["names"]]
    optimizer = kind(groups, **{key: value for key, value in defaults.items() if key in accepted})
    for group, settings in zip(optimizer.param_groups, step["settings"], strict=True):
        group.update({key: value for key, value in settings.items() if value is not None})
    for name, weight in weights.items():
        weight.grad = used[name].to(weight.dtype) if name in used else None
        if state := _whole_state(weight, [rank_states.get(name, {}) for rank_states in states]):
            optimizer.state[weight] = state
    optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _whole_state(weight: "torch.Tensor", of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for rank_state in of_ranks for key in rank_state):
        values = [rank_state[key] for rank_state in of_ranks if key in rank_state]
        if isinstance(values[0], list):
            state[key] = parts.whole(weight.shape, key, [{key: value} for value in values])
        else:
            state[key] = values[0]
    return state
