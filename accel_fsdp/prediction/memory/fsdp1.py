"""FSDP1's flat parameters: how its units are gathered, freed and reduced. Pure."""

from dataclasses import dataclass

from accel_fsdp.prediction.memory import shards
from accel_fsdp.prediction.memory.engines import Fsdp
from accel_fsdp.prediction.memory.timeline import GATHERED, GRADIENTS


@dataclass
class Fsdp1(Fsdp):
    """Flat parameters; the root, which is the first unit, stays gathered from the first forward to the end."""

    offloaded: int = 0

    def adds(self, unit: int) -> bool:
        """The views' gradients wait for the flat parameter's."""
        return False

    def _keep(self, unit: int, reduced_bytes: int) -> None:
        """Offloaded gradients are copied, and also stay on the GPU until the end of backward (`_saved_grad_shard`)."""
        if self.layout.offload:
            new_bytes = self._master(self.unit(unit), shard=True)
            self.meter.add(GRADIENTS, -reduced_bytes)
            self.meter.add(GRADIENTS, new_bytes)
            self.offloaded += new_bytes * self.counts[unit]
        else:
            super()._keep(unit, reduced_bytes)

    def end_backward(self) -> None:
        """Frees the copied gradients, as `prepare_gradient_for_optim` does."""
        self.meter.add(GRADIENTS, -self.offloaded)
        self.offloaded = 0
        super().end_backward()

    def kept_gradients(self) -> int:
        """`zero_grad` clears the views only; the flat gradients go with the next forward.

        (`_flat_param.py`, `_reset_flat_param_grad_info_if_needed`.)
        """
        return self.last_gradients()

    def _size(self, unit: int) -> int:
        """NO_SHARD gathers nothing; it only makes a copy if the dtype differs (`needs_unshard`)."""
        return super()._size(unit) if self.layout.is_sharded else shards.cast_bytes(self.unit(unit), self.layout)

    def _reshards(self, unit: int) -> bool:
        """NO_SHARD frees the copies of all units, the root's too (`post_reshard`)."""
        return self.layout.strategy == 3 or super()._reshards(unit)

    def _gather(self, unit: int) -> None:
        if self.layout.is_sharded:
            self._cast_and_gather(unit, self._size(unit))
        else:
            self.meter.add(GATHERED, self._size(unit))
        self.gathered.add(unit)

    def before_loss_backward(self) -> None:
        """Prefetches the last block, as the root's hook on the loss does (`_pre_backward_hook`)."""
        self.before_backward(len(self.units))

    def before_head_backward(self, unit: int) -> None:
        """Does nothing: the root was gathered with the loss."""

    def before_backward(self, unit: int) -> None:
        """Gathers the unit if need be, and prefetches the one before it."""
        for near in (unit, unit - 1):
            if 0 <= near < len(self.units) and near not in self.gathered:
                self._gather(near)

    def after_backward(self, unit: int, grad_bytes: int) -> None:
        if grad_bytes:
            unsharded, shard = self._reduction_bytes(unit)
            # the backward of torch.split joins the views' gradients in a new tensor
            self.meter.add(GRADIENTS, unsharded)
            self.meter.add(GRADIENTS, -grad_bytes)
            if unit in self.waiting:
                self.meter.add(GRADIENTS, -self.waiting.pop(unit))
            self._free_after(unit)
            if not self.syncs:
                self.waiting[unit] = unsharded
                return
            self.meter.add(GRADIENTS, shard)
            self.meter.add(GRADIENTS, -unsharded)
            self._keep(unit, shard)
        self._free_after(unit)

    def _free_after(self, unit: int) -> None:
        """Without a reduction, units that stay gathered after forward also stay after backward."""
        if self.syncs or self.layout.strategy in (1, 3, 4):
            self._free(unit)
