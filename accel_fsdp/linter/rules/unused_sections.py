"""Rules about sections that the engine ignores, and values that the launcher can't use."""

import re
from collections.abc import Iterator

from accel_fsdp.config import DEFAULT_PORT, DEFAULT_ZERO_STAGE, HYBRID, MULTI_CPU, Edit, Engine
from accel_fsdp.hardware import machines
from accel_fsdp.linter.rules.engine import Finding, Subject, rule

OFFLOADS = ("optimizer", "param")
HERE_ONLY = re.compile(r"127(\.\d+){3}|localhost|::1|0\.0\.0\.0|\[::1?\]|::", re.IGNORECASE)
"""Addresses under which every machine finds itself."""


@rule("AF110")
def compiled_twice(subject: Subject) -> Iterator[Finding]:
    """`dynamo_backend` at the top level beside a `dynamo_config`.

    Accelerate uses the old key and ignores the section.
    """
    if "dynamo_backend" in subject.values and subject.section("dynamo_config"):
        section = subject.section("dynamo_config")
        is_only_key = len(section) == 1 and section.get("dynamo_backend") == subject.values["dynamo_backend"]
        yield Finding(
            "dynamo_backend",
            f"dynamo_backend: {subject.values['dynamo_backend']} beside dynamo_config",
            "Accelerate drops dynamo_config and compiles as dynamo_backend says",
            "dynamo_backend inside dynamo_config alone",
            (Edit("", "dynamo_backend"),) if is_only_key else (),
        )


@rule("AF216")
def offload_to_nvme(subject: Subject) -> Iterator[Finding]:
    """`offload_..._device: nvme`, whose path isn't passed to the ranks: they swap to a folder named none.

    The path without the device has no effect.
    """
    section = subject.section("deepspeed_config")
    for what in OFFLOADS:
        device, path = f"offload_{what}_device", f"offload_{what}_nvme_path"
        nvme = str(section.get(device)).lower() == "nvme"
        if nvme and subject.engine is Engine.DEEPSPEED:
            yield Finding(
                f"deepspeed_config.{path if path in section else device}",
                f"{device}: nvme" + ("" if path in section else f" without {path}"),
                f"the launcher drops {path}, and the ranks swap to a folder named none in the folder they run in",
                f"a deepspeed_config_file for {device} and its path",
            )
        elif path in section and not nvme:
            yield Finding(
                f"deepspeed_config.{path}",
                f"{path} has no effect: {device} is {section.get(device, 'not given')}",
                "only nvme has a path",
                f"remove {path}",
                (Edit("deepspeed_config", path),),
                milder="note",
            )


@rule("AF217")
def deepspeed_file_is_missing(subject: Subject) -> Iterator[Finding]:
    """`deepspeed_config_file` that doesn't exist, relative to the folder where `check` runs.

    The ranks open it from the folder they are started in. A warning if it is beside the YAML, or in a folder that
    this machine doesn't have.
    """
    key = "deepspeed_config_file"
    path, place = subject.section("deepspeed_config").get(key), subject.absent.get(key)
    if subject.engine is Engine.DEEPSPEED and place is not None:
        what = {"beside": "is beside this YAML, not in the folder you launch from", "": "does not exist"}
        yield Finding(
            f"deepspeed_config.{key}",
            f"{key}: {path} " + what.get(place, "is in a folder that this machine doesn't have"),
            "each rank stops: Expected a string path to an existing deepspeed config",
            f"{key} with a path that holds from where you launch",
            milder="warning" if place else None,
        )


READERS = (
    ("deepspeed_config", "distributed_type", "DEEPSPEED"),
    ("fp8_config", "mixed_precision", "fp8"),
)
"""Sections, each with the key and value that makes something read it."""


@rule("AF326", "warning")
def section_of_another_engine(subject: Subject) -> Iterator[Finding]:
    """A `deepspeed_config` or `fp8_config` beside an engine or a precision that ignores it.

    (AF314 is about `fsdp_config`.)
    """
    kind = subject.values.get("distributed_type")
    if kind is None:
        return  # AF101
    precision = str(subject.top("mixed_precision")).lower()
    for section, key, needed in READERS:
        value = precision if key == "mixed_precision" else str(kind)
        if subject.values.get(section) and value != needed:
            yield Finding(
                section,
                f"{section} beside {key}: {value}",
                f"nothing reads {section}",
                f"{key}: {needed}, or remove {section}",
            )


@rule("AF327", "warning")
def parameters_stay_on_the_gpu(subject: Subject) -> Iterator[Finding]:
    """`offload_param_device` under a ZeRO stage below 3, where parameters aren't sharded: nothing is offloaded."""
    section = subject.section("deepspeed_config")
    stage = str(section.get("zero_stage", DEFAULT_ZERO_STAGE))
    device = str(section.get("offload_param_device", "none")).lower()
    if subject.engine is Engine.DEEPSPEED and stage in ("0", "1", "2") and device in ("cpu", "nvme"):
        yield Finding(
            "deepspeed_config.offload_param_device",
            f"offload_param_device: {device} has no effect with zero_stage: {stage}",
            "only stage 3 offloads parameters",
            "zero_stage: 3, or offload_param_device: none",
        )


@rule("AF415", pains=("P45",))
def address_of_every_machine(subject: Subject) -> Iterator[Finding]:
    """Several machines and a `main_process_ip` that only machine 0 can use, or `main_process_port: 0`.

    Under 127.0.0.1 every machine connects to itself; an address is a name or number without http:// and port; port 0 is
    a different free port on each machine. The machines then wait for one another until the timeout. $MASTER_ADDR isn't
    expanded in a YAML. A placeholder such as HOST, your_ip or 192.168.x.x is a warning, and a plain number, as in
    Accelerate's templates, a note.
    """
    if subject.number("num_machines") < 2 or subject.engine is Engine.NONE:
        return
    address = str(subject.values.get("main_process_ip") or "").strip()
    bare = address.strip("[]").partition("%")[0]  # [fe80::1%eth0]
    problem = machines.address_problem(bare) if address else ""
    if HERE_ONLY.fullmatch(address) and subject.values.get("distributed_type") != MULTI_CPU:
        yield Finding(
            "main_process_ip",
            f"main_process_ip: {address} and {subject.number('num_machines')} machines",
            "every machine finds itself under it, and all wait",
            "main_process_ip: an address of machine 0 that the others reach",
        )
    elif not HERE_ONLY.fullmatch(address) and (problem or machines.is_placeholder(bare)):
        yield Finding(
            "main_process_ip",
            f"main_process_ip: {address} is not an address",
            "no machine of that name is found, and all wait",
            "main_process_ip: 10.0.0.1 or a host's name, without http:// and port",
            milder="note" if address.isdecimal() else None if problem else "warning",
        )
    port = subject.values.get("main_process_port")
    if port == 0 and port is not False:
        yield Finding(
            "main_process_port",
            f"main_process_port: 0 and {subject.number('num_machines')} machines",
            "each machine takes another free port, and all wait",
            f"main_process_port: {DEFAULT_PORT}, the same on all",
        )


@rule("AF416", pains=("P48",))
def gpu_twice(subject: Subject) -> Iterator[Finding]:
    """`gpu_ids` that names one GPU twice, or a negative one: CUDA then shows none, or only those before it."""
    chosen = subject.values.get("gpu_ids")
    if not isinstance(chosen, str) or subject.engine is Engine.TPU:
        return
    numbers = [word.strip() for word in chosen.split(",")]
    repeated = [number for index, number in enumerate(numbers) if number in numbers[:index] and number]
    below_zero = [number for number in numbers if number.startswith("-")]
    if repeated or below_zero:
        yield Finding(
            "gpu_ids",
            f"gpu_ids: {chosen} names {repeated[0] + ' twice' if repeated else below_zero[0]}",
            "CUDA offers no GPU at all" if repeated else "CUDA offers the GPUs before it only",
            "gpu_ids: each GPU once, or all",
        )


@rule("AF328", "warning", pains=("P103",))
def copies_of_one_rank(subject: Subject) -> Iterator[Finding]:
    """FSDP1's hybrid strategies with one process on each machine: a copy of one rank, in which nothing is sharded.

    (AF316 refuses FSDP2's mesh of such copies.)
    """
    hybrid = subject.engine is Engine.FSDP1 and subject.strategy in HYBRID
    if hybrid and subject.ranks_here == 1:
        yield Finding(
            "num_processes",
            f"{subject.strategy} with one process on each machine",
            "it shards inside each machine, so every GPU holds the whole model",
            "more processes on each machine, or fsdp_sharding_strategy: FULL_SHARD",
        )
