"""How the ranks of a job share the model: the engine, its strategy, and the mesh of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from accel_fsdp.config import EXPERT_FLAG, STRATEGIES, Engine, zero_name
from accel_fsdp.errors import UsageError
from accel_fsdp.job.native import NATIVE_SIZES, expert_refusal, row_axis
from accel_fsdp.models import Divisible

FSDP_KINDS = frozenset({Engine.FSDP1, Engine.FSDP2})
SHARDING_KINDS = FSDP_KINDS | {Engine.DEEPSPEED}
NUMBERS = {name: number for number, name in STRATEGIES.items()}


@dataclass(frozen=True)
class Layout:
    """How the ranks share the model; `ranks` and `ranks_per_node` are 0 if unknown.

    `strategy` is a number of `STRATEGIES` (FSDP2 has 1, 2, 4 and 5), or the stage of ZeRO. `tensor` and `context` are
    the sizes of tensor parallelism and of context or sequence parallelism, whose ranks share a row. `experts` is the
    size of expert parallelism: ranks of one replica, in whole groups of ranks that share a row.
    """

    engine: Engine
    strategy: int = 1
    ranks: int = 0
    ranks_per_node: int = 0
    offload: bool = False
    tensor: int = 1
    context: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        """Accepts an engine or its name, as in JSON; transformers' plans always reshard after forward."""
        object.__setattr__(self, "engine", Engine(self.engine))
        if self.is_by_transformers and not self.reshards:
            object.__setattr__(self, "strategy", self.strategy - 1)

    @classmethod
    def alone(cls) -> "Layout":
        return cls(Engine.NONE, 1, 1, 1)

    @classmethod
    def ddp(cls, ranks: int, ranks_per_node: int) -> "Layout":
        return cls(Engine.DDP, 1, ranks, ranks_per_node)

    @classmethod
    def fsdp1(cls, strategy: str, ranks: int, ranks_per_node: int, offload: bool = False) -> "Layout":
        """A layout by the strategy's name; FULL_SHARD for an unknown one."""
        return cls(Engine.FSDP1, NUMBERS.get(strategy, 1), ranks, ranks_per_node, offload)

    @classmethod
    def fsdp2(cls, reshards: bool, ranks: int, ranks_per_node: int, offload: bool = False) -> "Layout":
        return cls(Engine.FSDP2, 1 if reshards else 2, ranks, ranks_per_node, offload)

    @classmethod
    def zero(cls, stage: int, ranks: int, ranks_per_node: int, offload: bool = False) -> "Layout":
        """A layout by the stage; stage 0 shards nothing, which is DDP."""
        return cls(Engine.DEEPSPEED, stage, ranks, ranks_per_node, offload) if stage else cls.ddp(ranks, ranks_per_node)

    def on_mesh(self, sizes: Mapping[str, int]) -> "Layout":
        """The layout on a device mesh. With replicas under FSDP2, the ranks of one replica count as one machine."""
        layout = replace(self, tensor=sizes["tp"], context=sizes["cp"] * sizes["sp"])
        if self.engine is Engine.FSDP2 and sizes["dp_replicate"] > 1:
            return replace(layout, strategy=self.strategy + 3, ranks_per_node=self.ranks // sizes["dp_replicate"])
        return layout

    @property
    def name(self) -> str:
        if self.engine is Engine.NONE:
            return "one GPU"
        if self.engine is Engine.DDP:
            return self.engine.label
        sharded = f"{self.engine.label} {STRATEGIES[self.strategy]}" if self.is_fsdp else zero_name(self.strategy)
        axes = [
            f"{axis} {size}" for axis, size in {**self.axes, row_axis(self.engine): self.context}.items() if size > 1
        ]
        if self.wrapper is not Engine.NONE:
            axes.insert(0, sharded + (" offload" if self.offload else ""))
        return ", ".join(axes)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the mesh by axis, for people and for `Divisible.misfits`."""
        return {"replicas": self.replicas, "fsdp": self.shard_ranks, "tp": self.tensor, "ep": self.experts}

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the axes that only transformers divides a model by, by the wizard's names."""
        return {"tp": self.tensor, "ep": self.experts}

    @property
    def mesh(self) -> str:
        """The mesh in words, without unused axes."""
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1)

    @property
    def is_fsdp(self) -> bool:
        return self.engine in FSDP_KINDS

    @property
    def is_by_transformers(self) -> bool:
        """Whether transformers, not Accelerate, shards the model, while loading it."""
        return self.tensor > 1 or self.experts > 1

    @property
    def wrapper(self) -> Engine:
        """The engine that wraps the model: NONE if only tensor parallelism divides it."""
        return Engine.NONE if self.tensor == self.ranks > 1 else self.engine

    @property
    def ranks_per_row(self) -> int:
        """Ranks that share the rows they train on."""
        return self.tensor * self.context

    @property
    def shares_rows(self) -> bool:
        return self.ranks_per_row > 1

    @property
    def data_ranks(self) -> int:
        """The groups of ranks that train on different rows."""
        return self.ranks // self.ranks_per_row

    def rows_of_all(self, each: int) -> int:
        """The rows of all ranks, if those that share rows have `each`."""
        return self.data_ranks * each

    def rows_of_each(self, total: int) -> int:
        return total // self.data_ranks

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds only a part of the parameters."""
        return self.shard_ranks > 1

    @property
    def replicas(self) -> int:
        """The copies of the parameters in the job."""
        return self.ranks // max(self.shard_ranks * self.tensor, 1)

    def shard_of(self, amount: float) -> float:
        """One rank's part of an amount that is sharded like the parameters."""
        return amount / self.shard_ranks

    @property
    def reshards(self) -> bool:
        """Whether FSDP shards the weights again between forward and backward."""
        return self.strategy in (1, 4)

    @property
    def shard_ranks(self) -> int:
        """The ranks that share one copy of the parameters: all, or with hybrid sharding those of one machine.

        A tensor-parallel group, whose ranks hold different parts, counts as one rank.
        """
        if self.engine in (Engine.DDP, Engine.NONE) or (self.engine is Engine.FSDP1 and self.strategy == 3):
            return 1
        hybrid = self.engine is not Engine.DEEPSPEED and self.strategy in (4, 5)
        return (self.ranks_per_node if hybrid else self.ranks) // self.tensor

    def check_experts(self) -> None:
        """Refuses ranks that can't divide the experts as requested.

        Raises:
            UsageError: names the sizes.
        """
        if self.experts_misfit:
            raise UsageError(
                f"{EXPERT_FLAG} {self.experts} on a mesh of {self.mesh}",
                why=f"transformers refuses it: {self.experts_misfit}",
                fix=Divisible().fix_of("ep", self.sizes),
            )

    @property
    def experts_misfit(self) -> str:
        """Why the ranks can't divide the experts; empty if they can (`DistributedConfig`, transformers)."""
        if self.experts > 1 and self.engine is not Engine.FSDP2:
            return f"it needs FSDP2, not {self.engine.label}"
        sizes = (1, self.shard_ranks, self.tensor, self.experts)  # replicas don't matter
        return expert_refusal(dict(zip(NATIVE_SIZES, sizes, strict=True)))

    def sharers(self, of_experts: bool) -> int:
        """The number of ranks that shard a parameter, which is a layer's expert or any other parameter."""
        return self.expert_shard_ranks if of_experts else self.shard_ranks

    @property
    def expert_shard_ranks(self) -> int:
        """The number of ranks over which the same experts are sharded."""
        return self.shard_ranks * self.tensor // self.experts
