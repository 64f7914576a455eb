"""DeepSpeed's ZeRO in the walk of `step.py`: its memory, gathers and reductions around a unit. Pure."""

from dataclasses import replace

from accel_fsdp.job import Layout
from accel_fsdp.models import state_bytes
from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.engines import EngineMemory
from accel_fsdp.prediction.memory.timeline import BUFFERS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS

MAX_LIVE_PARAMETERS, SUB_GROUP_SIZE = 10**9, 10**9  # DeepSpeed's defaults for stage 3
REDUCE_BUCKET_SIZE = 5 * 10**8
"""Gradients in DeepSpeed's bucket, for models of any size: its default, which Accelerate keeps unless the YAML
names a JSON file."""


class Zero(EngineMemory):
    """DeepSpeed's stages, with the stage as `strategy`: an estimate by DeepSpeed's formulas, not by single allocations.

    16-bit weights and gradients exist beside float32 masters (ZeRO paper, section 3), and one bucket to
    reduce (`setup_buckets` of stage_1_and_2.py, `ipg_buckets` of stage3.py). In stage 3 the gathered weights stay below
    `max_live_parameters`, and float32 copies of the gradients are made by groups of `sub_group_size`.
    """

    def load(self) -> None:
        stage, compute = self.layout.strategy, shards.compute_bytes(self.recipe)
        weights = self.total(lambda unit: shards.gathered_bytes(unit, Layout.alone()))
        if stage < 3:
            self.meter.add(PARAMETERS, weights)
        elif not self.layout.offload:
            self.meter.add(PARAMETERS, weights // self.layout.ranks)
        if not self.layout.offload:
            share = self._trained_numel() // self.layout.ranks
            self.meter.add(PARAMETERS, state_bytes.MASTER * share if compute == state_bytes.LOW else 0)
        self.meter.add(BUFFERS, REDUCE_BUCKET_SIZE * compute)

    def make_states(self) -> None:
        if not self.layout.offload:
            single_rank = replace(self.layout, ranks=1, ranks_per_node=1)
            unsharded = self.total(lambda unit: shards.optimizer_bytes(unit, self.recipe, single_rank))
            self.meter.add(OPTIMIZER, unsharded // self.layout.ranks)

    def adds(self, unit: int) -> bool:
        return False

    def _trained_numel(self) -> int:
        return self.total(lambda unit: unit.trained_numel)

    def before_forward(self, unit: int) -> None:
        """Stage 3 gathers the unit and prefetches about as many bytes."""
        if self.layout.strategy == 3:
            self._add_live(unit, 1)

    def after_forward(self, unit: int) -> None:
        if self.layout.strategy == 3:
            self._add_live(unit, -1)

    def before_backward(self, unit: int) -> None:
        self.before_forward(unit)

    def _add_live(self, unit: int, sign: int) -> None:
        size = 2 * shards.gathered_bytes(self.units[unit], Layout.alone())
        self.meter.add(GATHERED, sign * min(size, MAX_LIVE_PARAMETERS * state_bytes.LOW))

    def after_backward(self, unit: int, grad_bytes: int) -> None:
        """Stages 2 and 3 keep this rank's share of the gradients."""
        self.after_forward(unit)
        share = grad_bytes // self.layout.ranks if self.layout.strategy >= 2 else grad_bytes
        kept_bytes = 0 if self.layout.offload and self.layout.strategy >= 2 else share
        self.meter.add(GRADIENTS, -grad_bytes)
        self.meter.add(GRADIENTS, 0 if self.has_grads else kept_bytes)

    def step(self) -> None:
        """Allocates the gradients in float32, of this rank's share or of a sub-group of it."""
        if not self.layout.offload:
            share = self._trained_numel() // self.layout.ranks
            self.meter.touch({GRADIENTS: state_bytes.MASTER * min(share, SUB_GROUP_SIZE)})
