"""The variables of torchrun and `accelerate launch` for this rank; only this module reads them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
"""How the names begin by which Accelerate hands the YAML to the ranks."""
FAILURE_FILE = "ACCEL_FSDP_FAILURE_FILE"
MACHINE_RANK = "ACCEL_FSDP_MACHINE_RANK"
"""The variable by which `accel-fsdp launch` tells its ranks the number that the user or engine gave their machine."""
MEETING = "ACCEL_FSDP_MEETING"
"""The variable by which it tells them where the launchers of all machines meet: port and address."""
OFFLOAD_DEVICES = ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")


@dataclass(frozen=True)
class LaunchEnvironment:
    """The variables of one moment; `cpu` and `preflight` set some for the libraries."""

    variables: Mapping[str, str]

    @classmethod
    def now(cls) -> "LaunchEnvironment":
        return cls(dict(os.environ))

    def _is_on(self, name: str, default: bool = False) -> bool:
        """A switch, in any of the words that Accelerate takes; another word is none of them."""
        from accelerate.utils import str_to_bool

        try:
            return bool(str_to_bool(self.variables.get(name, str(default)).lower()))
        except ValueError:
            return default

    # This rank's place, as torchrun says it

    @property
    def is_rank(self) -> bool:
        """Whether torchrun or `accelerate launch` started this process as one rank of a job."""
        return int(self.variables.get("LOCAL_RANK", "-1")) >= 0

    @property
    def rank(self) -> int:
        return int(self.variables.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        return int(self.variables.get("LOCAL_RANK", "0"))

    @property
    def restarts(self) -> int:
        """How often torchrun has started the ranks anew."""
        return int(self.variables.get("TORCHELASTIC_RESTART_COUNT", "0"))

    @property
    def world_size(self) -> int:
        return int(self.variables.get("WORLD_SIZE", "1"))

    @property
    def local_world_size(self) -> int:
        return int(self.variables.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def machine_rank(self) -> int:
        """Of this machine, from 0; torchrun's own number under other launchers."""
        return int(self.variables.get(MACHINE_RANK, self.variables.get("GROUP_RANK", "0")))

    @property
    def meeting(self) -> tuple[str, int]:
        """Address and port at which the launchers of all machines meet; the address is empty where none says it."""
        port, _, address = self.variables.get(MEETING, "0").partition(" ")
        return address, int(port)

    @property
    def machines(self) -> int:
        return int(self.variables.get("GROUP_WORLD_SIZE", "1"))

    @property
    def main_address(self) -> str:
        return self.variables.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(self.variables.get("MASTER_PORT", "0"))

    @property
    def has_store(self) -> bool:
        """Whether the launcher holds the store at which ranks meet, so that no rank has to."""
        return self.variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def may_restart(self) -> bool:
        """Whether torchrun starts the ranks again when one has failed, or machines come or go (`--max-restarts`)."""
        return int(self.variables.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0

    @property
    def restarts_meet_in_one_store(self) -> bool:
        """Whether ranks that are started again find the keys of those before them (torch 2.13, c10d rendezvous)."""
        return self.may_restart and self.has_store

    @property
    def error_file(self) -> str:
        """Where torch's launcher looks for what a rank failed of; empty: nowhere."""
        return self.variables.get("TORCHELASTIC_ERROR_FILE", "")

    @property
    def failure_file(self) -> str:
        """What a rank that fails makes for `accel-fsdp launch`; empty: nothing."""
        return self.variables.get(FAILURE_FILE, "")

    # The YAML, as Accelerate exports it

    @property
    def has_config(self) -> bool:
        """Whether Accelerate's launcher read a YAML for this rank."""
        return "ACCELERATE_MIXED_PRECISION" in self.variables

    @property
    def settings(self) -> dict[str, str]:
        return {name: value for name, value in sorted(self.variables.items()) if name.startswith(EXPORTED)}

    @property
    def mixed_precision(self) -> str:
        return self.variables.get("ACCELERATE_MIXED_PRECISION", "no")

    @property
    def uses_cpu(self) -> bool:
        return self._is_on("ACCELERATE_USE_CPU")

    @property
    def uses_deepspeed(self) -> bool:
        return self._is_on("ACCELERATE_USE_DEEPSPEED")

    @property
    def uses_fsdp(self) -> bool:
        return self._is_on("ACCELERATE_USE_FSDP")

    @property
    def shards(self) -> bool:
        return self.uses_fsdp or self.uses_deepspeed

    @property
    def uses_fsdp1(self) -> bool:
        return self.uses_fsdp and not self.uses_fsdp2

    @property
    def uses_fsdp2(self) -> bool:
        return self.uses_fsdp and self.variables.get("FSDP_VERSION") == "2"

    @property
    def sharding_strategy(self) -> str:
        return self.variables.get("FSDP_SHARDING_STRATEGY", "").upper()

    @property
    def state_dict_type(self) -> str:
        return self.variables.get("FSDP_STATE_DICT_TYPE", "")

    @property
    def wraps_layer_classes(self) -> bool:
        return self.uses_fsdp and self.variables.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "TRANSFORMER_BASED_WRAP"

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """Their names; empty: the model's own."""
        names = self.variables.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
        return tuple(names.split(",")) if names else ()

    @property
    def ignores_modules(self) -> bool:
        return bool(self.variables.get("FSDP_IGNORED_MODULES"))

    @property
    def loads_on_rank_zero(self) -> bool:
        return self._is_on("FSDP_CPU_RAM_EFFICIENT_LOADING")

    @property
    def recomputes_units(self) -> bool:
        return self._is_on("FSDP_ACTIVATION_CHECKPOINTING")

    @property
    def flattens(self) -> bool:
        return not self._is_on("FSDP_USE_ORIG_PARAMS", default=True)

    @property
    def syncs_module_states(self) -> bool:
        return self._is_on("FSDP_SYNC_MODULE_STATES")

    @property
    def offloads(self) -> bool:
        """Whether something is to rest in the host's memory."""
        devices = (self.variables.get(name, "none") for name in OFFLOAD_DEVICES)
        return self._is_on("FSDP_OFFLOAD_PARAMS") or any(device != "none" for device in devices)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of `parallelism_config` that are more than 1, by name."""
        names = ("DP_REPLICATE", "DP_SHARD", "TP", "CP", "SP")
        sizes = {name.lower(): int(self.variables.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1")) for name in names}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def ranks_per_row(self) -> int:
        """Ranks that share the rows they train on: tensor, context and sequence parallel."""
        return prod(size for name, size in self.mesh.items() if name in ("tp", "cp", "sp"))
