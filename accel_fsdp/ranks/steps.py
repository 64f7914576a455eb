"""Records each step of an optimizer on a rank: rates, backward passes, gradients, mode, and the weights around it.

It computes sums on each rank, without communication, so it can't hang a script. `rehearsal/mistakes.py` judges them.
"""

import math
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_fsdp.config import Engine
from accel_fsdp.job import from_run
from accel_fsdp.ranks import events, holding, parts, script
from accel_fsdp.ranks.holding import user_name
from accel_fsdp.ranks.observing import Observation, after, before, guarded
from accel_fsdp.ranks.parts import Place
from accel_fsdp.ranks.schedules import ObservedSchedules

if TYPE_CHECKING:
    import torch
    from torch import nn

WORDS = ("nan_to_num", ".eval()", "requires_grad", "add_param_group")
"""Words of lines that the judges name: of each the line that is nearest to the first backward pass, or the pass."""
SETTINGS = ("lr", "weight_decay", "betas", "momentum")
"""The settings with which an optimizer updates a group of parameters; they must be equal on all ranks."""
WEIGHTS = Observation("weights around each step", *parts.RELIES_ON)
Sums = tuple[float, float]
"""The sum and the norm. Rounding hardly changes them; other random values change the sum by about the norm."""


def sums(values: "torch.Tensor | None") -> Sums:
    """Zeros without values and for packed ones, NaN for what can't be summed: it compares as unknown."""
    import torch

    if values is None or values.is_meta or not values.is_floating_point():
        return 0.0, 0.0
    try:
        plain = parts.local(values.detach())
        plain = plain.coalesce().values() if plain.is_sparse else plain
        return float(plain.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(plain, dtype=torch.float64))
    except Exception:  # of a kind of tensor that a library defines
        return math.nan, math.nan


def is_sharded(parameter: Any) -> bool:
    """Whether FSDP keeps only a part of a parameter on each rank."""
    from torch.distributed.fsdp._flat_param import FlatParameter
    from torch.distributed.tensor import DTensor

    kinds = (DTensor, FlatParameter)
    return isinstance(parameter, kinds) or bool(getattr(parameter, "_fsdp_flattened", False))


@dataclass
class _Optimizer:
    """`oldest`: the number of the first backward pass whose gradients it still has; 0 if they were cleared.

    `tracked` is a weight of it that has a gradient, and `noted` that gradient's sums after the last pass or step.
    """

    number: int
    made_at: str = ""
    oldest: int = 0
    tracked: Any = None
    noted: Sums = (0.0, 0.0)

    def before_backward(self) -> None:
        """Notes whether gradients were cleared or changed since; zeros and None count as cleared."""
        now = sums(getattr(self.tracked, "grad", None))
        if now != self.noted or not now[1]:
            self.oldest = 0

    def note(self, optimizer: Any) -> None:
        self.noted = sums(getattr(self.tracked, "grad", None))
        if not self.noted[1]:
            weights = (weight for group in optimizer.param_groups for weight in group["params"])
            self.tracked = next((weight for weight in weights if sums(weight.grad)[1]), None)
            self.noted = sums(getattr(self.tracked, "grad", None))


@dataclass
class _Model:
    """A trained model. `is_copy`: the ranks must change it in the same way, as in no wrapper or under DDP.

    `frozen`: the weights that needed no gradients when it was wrapped, or before the first step. `uncovered`: the sums
    of each weight in no optimizer when it first had a gradient, `last` those of copies after the last step.
    """

    number: int
    model: "weakref.ref[nn.Module]"
    places: list[Place]
    is_copy: bool
    frozen: frozenset[str] = frozenset()
    uncovered: dict[str, Sums] = field(default_factory=dict)
    last: dict[str, Sums] = field(default_factory=dict)

    @property
    def trained(self) -> list[Place]:
        return [place for place in self.places if place.parameter.requires_grad]


class ObservedSteps:
    """Reports a `step` before each step of an optimizer, and `trained` at the end of the script.

    Lines are those of the script's latest calls.
    """

    def __init__(self) -> None:
        self.schedules = ObservedSchedules()
        self.optimizers: weakref.WeakKeyDictionary[Any, _Optimizer] = weakref.WeakKeyDictionary()
        self.models: list[_Model] = []
        self.made = self.wrapped = self.backwards = self.steps = self.common_steps = 0
        self.covered: set[int] = set()
        self.known: set[int] = set()
        self.stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.first: list[Sums] | None = None
        self.is_due = False
        self.sees_weights = self.has_ended = False
        self.backward_line = self.loaded_at = ""
        self.began: dict[str, Sums] = {}

    def install(self) -> None:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import Optimizer
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.schedules.install()
        after(Optimizer, "__init__", self._on_optimizer)
        before(nn.Module, "load_state_dict", self._note_load)
        register_optimizer_step_post_hook(guarded(self._after_step))
        self.sees_weights = WEIGHTS.is_possible
        if self.sees_weights:
            after(DistributedDataParallel, "__init__", self._wrapped)

    def _on_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._known(optimizer).made_at = script.line_of_stack(sys._getframe(2))

    def _known(self, optimizer: Any) -> _Optimizer:
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = _Optimizer(self.made)
            self.made += 1
        return self.optimizers[optimizer]

    def _note_load(self, *_: Any, **__: Any) -> None:
        self.loaded_at = script.line_of_stack(sys._getframe(2))

    def _wrapped(self, model: Any, *_: Any, **__: Any) -> None:
        ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
        places = [place for place in parts.places(model.module) if place.name not in {*map(user_name, ignored)}]
        self._add(model, places, is_copy=True)

    def begin(self, models: Iterable["nn.Module"], optimizer: Any) -> None:
        """Called before the first step with the models that ran: adds those of its optimizer, or all if it has none."""
        trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        added = {id(place.parameter) for model in self.models for place in model.places}
        candidates = []
        for model in models:
            self.known |= set(map(id, model.parameters()))
            if self.sees_weights and not from_run.is_deepspeed(model):  # whose gradients are elsewhere
                places = parts.places(model)
                ids = {id(place.parameter) for place in places}
                candidates += [] if ids & added else [(model, places, bool(ids & trained))]
        for model, places, is_trained in candidates:
            if is_trained or not (added or any(of_optimizer for *_, of_optimizer in candidates)):
                is_whole = not any(is_sharded(place.parameter) for place in places)
                is_copy = is_trained and is_whole and from_run.engine_of(model) == Engine.NONE.label
                self._add(model, places, is_copy)
                self.is_due |= is_copy
        if candidates or not self.steps:
            self.report_weights()

    def _add(self, model: "nn.Module", places: list[Place], is_copy: bool) -> None:
        frozen = frozenset(place.name for place in places if not place.parameter.requires_grad)
        self.models = [known for known in self.models if known.model() is not None]
        self.models.append(_Model(self.wrapped, weakref.ref(model), places, is_copy, frozen))
        self.wrapped += 1
        self.known |= {id(weight) for weight in (*model.parameters(), *(place.parameter for place in places))}

    def before_backward(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.before_backward()

    def ran_backward(self, models: "Iterable[nn.Module]") -> None:
        """Called after each backward pass; `models` are the outermost that ran before the first step."""
        if not self.backwards:
            self.backward_line = script.line_of_stack(sys._getframe(2))
            self.first = None if self.steps else _sums_of_all(models)
        self.backwards += 1
        self.is_due = True
        for optimizer, known in self.optimizers.items():
            known.oldest = known.oldest or self.backwards
            known.note(optimizer)

    def before_step(self, optimizer: Any) -> None:
        if self.has_ended:  # an optimizer of the replay
            return
        known = self._known(optimizer)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        ids = {id(weight) for weight in weights}
        own = [model for model in self.models if any(id(place.parameter) in ids for place in model.places)]
        is_copy = any(model.is_copy for model in own)
        self.steps += 1
        self.stepped.add(optimizer)
        self.covered |= ids
        trained = {id(place.parameter) for model in self.models for place in model.trained}
        gradients = {"gradients": self._gradients(weights)} if self.is_due else {}
        is_common = is_copy or any(map(is_sharded, weights))
        self.common_steps += is_common
        events.report(
            "step",
            optimizer=known.number,
            is_common=is_common,
            is_copy=is_copy,
            line=script.line_of_stack(sys._getframe(2)),
            made_at=known.made_at,
            backwards=self.backwards,
            oldest=known.oldest,
            groups=[_settings(group) for group in optimizer.param_groups],
            evaluating=any(map(_is_evaluating, own)),
            loaded_at=self.loaded_at,
            moved_at=self.schedules.moved_at(optimizer),
            missing=len(trained - ids),
            strange=len(ids - self.known) if self.known else 0,
            **gradients,
        )
        self.loaded_at = ""
        known.note(optimizer)

    def _gradients(self, weights: Iterable[Any]) -> float:
        """The norm of these weights' and all models' gradients. Notes those of weights in no optimizer until now."""
        norms = {id(weight): sums(weight.grad)[1] for weight in weights}
        for model in self.models:
            for place in model.trained:
                number = id(place.parameter)
                norms.setdefault(number, sums(place.parameter.grad)[1])
                if norms[number] and number not in self.covered and place.name not in model.uncovered:
                    model.uncovered[place.name] = sums(place.now())
        return math.hypot(*norms.values())

    def _after_step(self, *_: Any) -> None:
        """Reads the weights once after each backward pass: an optimizer may step for each weight."""
        if self.is_due:
            self.is_due = False
            for model in (model for model in self.models if model.is_copy):
                model.last = {place.name: sums(place.now()) for place in model.trained}

    def report_end(self, models: Iterable["nn.Module"], batches: tuple[int, int]) -> None:
        """Called at the end of the script; `models` are those that it still has, if no optimizer has stepped.

        `batches` are those of an epoch: of all ranks, and of this one.
        """
        self.has_ended = True
        self.report_weights()
        events.report(
            "trained",
            optimizers=self.made,
            backwards=self.backwards,
            steps=self.steps,
            common_steps=self.common_steps,
            kept=not self.steps and bool(self.first) and self.first == _sums_of_all(models),
            backward_line=self.backward_line,
            lines={word: script.nearest_line(self.backward_line, word) for word in WORDS},
            batches=batches,
            models=list(map(self._content, self.models)),
            schedules=self.schedules.content(self.optimizers),
        )

    def report_weights(self) -> None:
        """Reports the part that this rank holds of each weight: its start, sum and norm."""
        for model in self.models:
            values = {place.name: sums(place.now()) for place in model.places}
            self.began = values | self.began
            held = {place.name: [place.start, *values[place.name]] for place in model.places}
            events.report("weights", model=model.number, held=held)

    def _content(self, model: _Model) -> dict[str, Any]:
        """`left`: the weights in no optimizer that never changed here. `changed`: those in none that did."""
        trained = {place.name: place for place in model.trained}
        left = [
            name
            for name in model.uncovered.keys() & trained.keys()
            if sums(trained[name].now()) == model.uncovered[name] and id(trained[name].parameter) not in self.covered
        ]
        return {
            "number": model.number,
            "is_copy": model.is_copy,
            "last": model.last,
            "end": {name: sums(place.now()) for name, place in trained.items()},
            "unfrozen": sorted(model.frozen & trained.keys()),
            "left": sorted(left),
            "changed": sorted(model.uncovered.keys() - left),
        }


def _is_evaluating(model: _Model) -> bool:
    """Whether a model that has dropout, or statistics of batches, is in evaluation mode."""
    if (module := model.model()) is None or (inner := holding.unwrapped(module)).training:
        return False
    return any(map(_differs_in_training, inner.modules()))


def _differs_in_training(module: "nn.Module") -> bool:
    """Whether a layer computes other values in training mode, by dropout or by a batch's statistics."""
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    rates = [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return isinstance(module, _BatchNorm) or any(rates) or (isinstance(module, _DropoutNd) and module.p > 0)


def _settings(group: dict[str, Any]) -> dict[str, list[float]]:
    return {key: _numbers_in(group[key]) for key in SETTINGS if key in group}


def _numbers_in(value: Any) -> list[float]:
    """The numbers in an optimizer's setting, without values such as None."""
    items = value if isinstance(value, tuple | list) else [value]
    return [float(number) for number in items if isinstance(number, int | float) or hasattr(number, "item")]


def _sums_of_all(models: Iterable["nn.Module"]) -> list[Sums]:
    return [sums(weight) for model in models for weight in model.parameters() if weight.requires_grad]
