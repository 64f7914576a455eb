"""The parameters that tensor and expert parallelism divide, by transformers' plans for a model."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from accel_fsdp.config import EXPERT_FLAG, Method, size_key
from accel_fsdp.errors import UserError
from accel_fsdp.models.config_json import EXPERTS

ROWS = frozenset(
    {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise"}
)  # of the last two dimensions, the one of a linear layer's outputs, or of a table's tokens
COLUMNS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise"})
DISPATCHED = "grouped_gemm"
"""Styles of transformers' plans that divide a parameter (transformers 5.23, `distributed/tensor_parallel.py` and
`expert_parallel.py`); parameters with another style, or none, are whole on each rank."""
REPLICATED = "replicated_with_grad_allreduce"
FUSED = frozenset({"qkv_proj", "query_key_value"})
QUERIES, KEYS = FUSED | {"q_proj", "q_b_proj"}, FUSED | {"k_proj"}
"""Layers whose outputs are whole heads, which the ranks of an axis share evenly or not at all."""
SETTINGS: Mapping[str, str] = {
    "tp": size_key("tp"),
    "ep": EXPERT_FLAG,
    "full": "full training, without --load_in_4bit and --use_peft",
    "lora": "LoRA, without --load_in_4bit",
}
"""What the user sets, in a YAML and in the arguments of `train/sft.py`: axes by name, and methods."""
OLD_NAMES = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""The router and the layers of an expert in transformers 4, before it fused experts."""
UNTRAINED = frozenset({"llama4_text", "apertus"})
"""Models whose plan for `tp` can't train (transformers 5.23): Llama 4 stops in the first step, and the scalars of
Apertus' activation get a part of their gradients."""
SINCE = "5.23"
"""The first version of transformers whose meshes were compared with one process."""
PACKED_SINCE = "2.13"
"""The first version of torch whose checkpoints were tried with packed matrices that `tp` divides."""


def check_version(axis: str) -> None:
    """Checks that the installed transformers can divide a model correctly; `axis` is the setting that requests it.

    Raises:
        UserError: it is older than `SINCE`.
    """
    from importlib import metadata

    from packaging.version import Version

    if Version(installed := metadata.version("transformers")) < Version(SINCE):
        raise UserError(
            f"{axis} with transformers {installed}",
            why="its tensor and expert parallelism lacks axes, or trains with wrong gradients",
            fix=f"pip install 'transformers>={SINCE}'",
        )


def divisors(sizes: Mapping[str, int]) -> dict[str, int]:
    """The divisors of a model's counts on a mesh: of its heads, its experts, and the rows of a tied embedding."""
    return {"heads": sizes["tp"], "experts": sizes["ep"], "rows": sizes["fsdp"] * sizes["tp"]}


class Misfit(NamedTuple):
    """Why the ranks of an axis, tp or ep, can't divide a model: its weights, no plan, a count, or a tie."""

    kind: Literal["weights", "plan", "count", "tie"]
    axis: str
    what: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Divisible:
    """The facts that decide whether tensor and expert parallelism can divide a model.

    `heads` and `kv_heads` are those that tensor parallelism divides, 0 where the model's plan leaves attention whole.
    `experts` is the number in a layer. `tensor_plan` and `expert_plan` say whether transformers knows how to divide its
    layers and experts, None if unknown. `replicated_norms`: norms inside the divided attention, whose gradients its
    plan sums over the ranks. `tied_rows` are the rows of an embedding that is also the head. `packed`: tensor
    parallelism divides matrices that hold several, such as fused experts. `expert_targets` are the names of modules
    that LoRA takes for the fused experts or their router.
    """

    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    tensor_plan: bool | None = None
    expert_plan: bool | None = None
    replicated_norms: bool = False
    tied_rows: int = 0
    packed: bool = False
    expert_targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Divisible":
        """Takes the fields of this class from a mapping that may hold others."""
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        return cls(**{**known, "expert_targets": tuple(facts.get("expert_targets", ()))})

    def misfits(
        self,
        sizes: Mapping[str, int],
        method: Method = "full",
        settings: Mapping[str, str] = SETTINGS,
        torch: str | None = None,
        targets: Iterable[str] = (),
    ) -> Iterator[Misfit]:
        """Why a mesh of these sizes can't divide the model. `sizes` has those of "fsdp", "tp" and "ep".

        `settings` are the names of what the user sets, as in `SETTINGS`; `torch` is its version, if known; `targets`
        are the modules that get an adapter.
        """
        weights = (*_weight_misfits(sizes, method), *self._packed_misfits(sizes, torch))
        if method == "lora":
            weights += (*self._adapter_misfits(sizes, targets),)
        for misfit in (*weights, *self._plan_misfits(sizes), *self._tie_misfits(sizes)):
            fix = self.fix_of(misfit.axis, sizes, settings) if misfit.kind == "count" else misfit.fix
            yield misfit._replace(fix=fix.format(**settings, without=_sized(misfit.axis, [], sizes, settings)))

    def fitting(self, axis: str, sizes: Mapping[str, int]) -> list[int]:
        """The sizes of an axis, above 1, with which the same ranks can divide the model's heads or experts."""
        ranks, fixed = sizes["fsdp"] * sizes["tp"], sizes["ep" if axis == "tp" else "tp"]
        counts = (ranks, self.heads, self.kv_heads) if axis == "tp" else (ranks, self.experts)
        return [
            size
            for size in range(2, ranks + 1)
            if not any(count % size for count in counts)
            and (fixed == 1 or (fixed % size if axis == "tp" else size % fixed) == 0)
        ]

    def fix_of(self, axis: str, sizes: Mapping[str, int], settings: Mapping[str, str] = SETTINGS) -> str:
        """What to type for an axis whose size doesn't fit."""
        return _sized(axis, self.fitting(axis, sizes), sizes, settings)

    def _packed_misfits(self, sizes: Mapping[str, int], torch: str | None) -> Iterator[Misfit]:
        from packaging.version import Version

        if self.packed and sizes["tp"] > 1 and torch and Version(torch) < Version(PACKED_SINCE):
            what = f"packed matrices, such as fused experts, with tp {sizes['tp']} and torch {torch}"
            why = "torch trains them, and can't write or read their checkpoints"
            yield Misfit("weights", "tp", what, why, f"pip install 'torch>={PACKED_SINCE}'; or {{without}}")

    def _adapter_misfits(self, sizes: Mapping[str, int], targets: Iterable[str]) -> Iterator[Misfit]:
        names = [name for name in targets if "experts" in (path := name.split(".")) or path[-1] in self.expert_targets]
        if names and sizes["ep"] > 1 and self.expert_plan is not False:
            what = f"an adapter on the experts ({', '.join(names)}) with ep {sizes['ep']}"
            why = "PEFT 0.21 has none for experts of which each rank holds a part"
            fix = "--lora_target_modules all-linear, which leaves fused experts as they are; or {without}"
            yield Misfit("weights", "ep", what, why, fix)

    def _plan_misfits(self, sizes: Mapping[str, int]) -> Iterator[Misfit]:
        plans = {"tp": (self.tensor_plan, "layers"), "ep": (self.expert_plan, "experts")}
        for axis, (plan, parts) in plans.items():
            if plan is False and sizes[axis] > 1:
                what = f"{axis} {sizes[axis]}: transformers has no plan to divide the {parts} of this model"
                why = "it doesn't know how to split them, or trains them wrong"
                yield Misfit("plan", axis, what, why, "{without}")
        counts = {"attention heads": ("tp", self.heads), "key/value heads": ("tp", self.kv_heads)}
        for noun, (axis, count) in {**counts, "experts": ("ep", self.experts)}.items():
            if count % sizes[axis] and plans[axis][0] is not False:
                what = f"{axis} {sizes[axis]} doesn't divide the model's {count} {noun}"
                yield Misfit("count", axis, what, "each rank holds a whole number of them", "")

    def _tie_misfits(self, sizes: Mapping[str, int]) -> Iterator[Misfit]:
        """transformers 5.23 gives FSDP a tied weight twice, and torch copies it for one of the two where it pads."""
        axis, ranks = "tp" if sizes["tp"] > 1 else "ep", divisors(sizes)["rows"]
        if sizes[axis] > 1 and sizes["fsdp"] > 1 and self.tied_rows % ranks:
            yield Misfit(
                *("tie", axis),
                f"a vocabulary of {self.tied_rows:,} in an embedding that is also the head, over {ranks} ranks",
                "the head would keep its first weights while the embedding is trained, without an error",
                f"ranks whose number divides {self.tied_rows:,}; or {{without}}",
            )


def _sized(axis: str, values: list[int], sizes: Mapping[str, int], settings: Mapping[str, str]) -> str:
    """What to type for an axis to have one of these sizes, on as many ranks; without any, to leave it out."""
    name = settings[axis]
    if name.startswith("--"):
        return f"{name} {' or '.join(map(str, values))}" if values else f"leave out {name}"
    size = max(values, default=1)
    return f"{name}: {size} and {size_key('dp_shard')}: {sizes['fsdp'] * sizes['tp'] // size}"


def _weight_misfits(sizes: Mapping[str, int], method: Method) -> Iterator[Misfit]:
    axis = "tp" if sizes["tp"] > 1 else "ep"
    if method == "qlora" and sizes[axis] > 1:
        what, why = "packed weights, of 4-bit or 8-bit values,", "they have another shape than the plan divides"
        fix = "{full}; or {without}" if axis == "tp" else "{lora}; or {without}"
        yield Misfit("weights", axis, f"{what} with {axis} {sizes[axis]}", why, fix)
    elif method == "lora" and axis == "tp":
        why = "PEFT 0.21 stops in the first step of an adapter on split layers"
        yield Misfit("weights", axis, f"an adapter with {axis} {sizes[axis]}", why, "{without}; or {full}")


def cuts(model: Any) -> dict[str, int]:
    """The dimension that tensor parallelism divides, by parameter name."""
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    dimensions_by_name: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        style, dimensions = style_of(name, plan), parameter.dim()
        if style in ROWS:
            dimensions_by_name[name] = max(dimensions - 2, 0)
        elif style in COLUMNS and dimensions > 1:
            dimensions_by_name[name] = dimensions - 1
    return dimensions_by_name


def dispatched(model: Any) -> frozenset[str]:
    """The names of the parameters whose first dimension, the experts, expert parallelism divides."""
    plan: Mapping[str, str] = getattr(model, "ep_plan", None) or {}
    return frozenset(name for name, _ in model.named_parameters() if style_of(name, plan) == DISPATCHED)


def divisible_by_config(config: Any) -> Divisible:
    """The facts that a model's config contains; heads are 0 if the plan doesn't divide them."""
    try:
        text = config.get_text_config()
    except ValueError:  # several parts read text
        return Divisible()
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    divided = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}

    def count(*names: str) -> int:
        with contextlib.suppress(RuntimeError):  # a number that differs between layers
            return next((int(number) for name in names if (number := getattr(text, name, None))), 0)
        return 0

    return Divisible(
        heads=count("num_attention_heads") if divided & QUERIES else 0,
        kv_heads=count("num_key_value_heads") if divided & KEYS else 0,
        experts=count(*EXPERTS),
        tensor_plan=any("*" in name for name in plan) and text.model_type not in UNTRAINED,  # gpt-oss: embeddings alone
        expert_plan=bool(getattr(text, "base_model_ep_plan", None)),
        replicated_norms=REPLICATED in plan.values(),
        tied_rows=count("vocab_size") if getattr(config, "tie_word_embeddings", False) else 0,
        packed=any(style.startswith("packed") for style in plan.values()),
        expert_targets=expert_targets(config) if count(*EXPERTS) else (),
    )


def expert_targets(config: Any) -> tuple[str, ...]:
    """The names of modules that PEFT 0.21 takes for a mixture's fused experts or their router, in an adapter's targets.

    It does so in the families that had such modules in transformers 4, also for dense layers and shared experts.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    adapter = LoraConfig(target_modules=list(OLD_NAMES))
    convert_peft_config_for_transformers(adapter, SimpleNamespace(config=config), None)
    return tuple(sorted(OLD_NAMES - set(adapter.target_modules or ())))


def style_of(name: str, plan: Mapping[str, str]) -> str:
    """The style of a parameter: its own or that of its module, with any number for each `*` of the plan."""
    general = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(general) or plan.get(general.rpartition(".")[0], "")
