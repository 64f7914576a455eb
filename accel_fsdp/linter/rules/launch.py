"""Rules about processes and machines, and how the job is started (`--args` with a command line)."""

import re

from accel_fsdp.config import DEFAULT_PORT, MULTI_CPU, PLACING, Edit, Engine
from accel_fsdp.hardware import machines
from accel_fsdp.linter.rules.engine import Cases, Each, Row
from accel_fsdp.linter.rules.subject import Subject
from accel_fsdp.linter.rules.values import joined
from accel_fsdp.units import counted, listed

HERE_ONLY = re.compile(r"127(\.\d+){3}|localhost|::1|0\.0\.0\.0|\[::1?\]|::", re.IGNORECASE)
"""Addresses under which every machine finds itself."""
OTHER_ENGINES = ("multi_gpu", "use_deepspeed", "tpu")
"""Flags of `accelerate launch` that replace the file's engine."""
ON_GPUS = (Engine.FSDP1, Engine.FSDP2, Engine.DDP, Engine.DEEPSPEED)


def _no_processes(subject: Subject) -> Cases:
    is_bare_no = subject.values.get("distributed_type") is False  # AF208
    if not subject.lacks_processes or not subject.has_engine or is_bare_no:
        return None
    value = subject.values.get("num_processes")
    number = "1" if subject.engine is Engine.NONE else "the GPUs of all machines together"
    return {"number": number, "value": " is missing" if value is None else f": {value} means none"}


def _remainder(subject: Subject) -> Cases:
    processes, total = subject.top("num_processes"), subject.top("num_machines")
    are_counts = isinstance(processes, int) and isinstance(total, int) and processes > 0 and total > 0
    if not are_counts or not processes % total:
        return None
    each = processes // total
    return {"processes": processes, "machines": total, "each": each, "number": max(each, 1) * total}


def _no_address(subject: Subject) -> Cases:
    """DeepSpeed's own launchers, pdsh among them, take the machines from `deepspeed_hostfile` instead.

    An error if `accelerate launch` starts the job; nothing if another command does, as header or arguments say.
    """
    total = subject.top("num_machines")
    section = subject.section("deepspeed_config") if subject.engine is Engine.DEEPSPEED else {}
    by_hostfile = section.get("deepspeed_multinode_launcher") != "standard" and section.get("deepspeed_hostfile")
    address = subject.launcher.get("main_process_ip") or subject.top("main_process_ip")
    by_others = subject.starter not in ("", "accelerate")
    if not isinstance(total, int) or total < 2 or address or by_hostfile or by_others:
        return None
    return {"machines": total, "severity": "error" if subject.starter else None}


def _too_few(subject: Subject) -> Each:
    for key in ("num_processes", "num_machines"):
        value = subject.values.get(key)
        if isinstance(value, int) and value < 1 and value != -1:
            yield {"key": key, "value": value}


def _starter(subject: Subject) -> Cases:
    """Train/sft.py reads the file by itself where `--accelerate_config` names it."""
    reads_it = subject.uses_sft and subject.arg("accelerate_config")
    by_another = subject.is_fsdp and subject.starter in ("python", "python3", "torchrun") and not reads_it
    return {"starter": subject.starter} if by_another else None


def _other_rank(subject: Subject, alone: bool) -> Cases:
    rank, total = subject.values.get("machine_rank"), subject.number("num_machines") or 1
    if not isinstance(rank, int) or isinstance(rank, bool) or 0 <= rank < total or alone != (total == 1):
        return None
    return {"rank": rank, "machines": counted(total, "machine"), "last": total - 1}


def _few_ids(subject: Subject) -> Cases:
    """Two ranks would share a GPU; a single id under MULTI_GPU on one machine is refused by the launcher."""
    chosen, ranks = _count_of_ids(subject), subject.ranks_here
    if subject.engine not in ON_GPUS or not chosen or subject.values.get("distributed_type") == MULTI_CPU:
        return None
    single = chosen == 1 and subject.engine is Engine.DDP and subject.top("num_machines") == 1
    why = "the launcher stops: less than two GPU ids" if single else "NCCL stops: Duplicate GPU detected"
    processes = counted(max(ranks, 1), "process", "processes")
    words = {"ids": subject.top("gpu_ids"), "processes": processes, "why": why}
    return words if chosen < ranks or single else None


def _count_of_ids(subject: Subject) -> int:
    """The number of GPUs in `gpu_ids`; 0 for all of them."""
    chosen = subject.top("gpu_ids")
    if chosen in (None, "all"):
        return 0
    return len([number for number in joined(chosen).split(",") if number.strip()])


def _several(subject: Subject) -> int:
    """The number of machines whose processes connect to one another; 0 for a single machine."""
    total = subject.number("num_machines")
    return total if total > 1 and subject.engine is not Engine.NONE else 0


def _own_address(subject: Subject) -> Cases:
    address = str(subject.values.get("main_process_ip") or "").strip()
    is_own = HERE_ONLY.fullmatch(address) and subject.values.get("distributed_type") != MULTI_CPU
    return {"address": address, "machines": _several(subject)} if _several(subject) and is_own else None


def _odd_address(subject: Subject) -> Cases:
    """A placeholder such as HOST or 192.168.x.x is a warning, a plain number, as in Accelerate's templates, a note."""
    address = str(subject.values.get("main_process_ip") or "").strip()
    bare = address.strip("[]").partition("%")[0]  # [fe80::1%eth0]
    problem = machines.address_problem(bare) if address else ""
    if not _several(subject) or HERE_ONLY.fullmatch(address) or not (problem or machines.is_placeholder(bare)):
        return None
    return {"address": address, "severity": "note" if address.isdecimal() else None if problem else "warning"}


def _any_port(subject: Subject) -> Cases:
    port = subject.values.get("main_process_port")
    return {"machines": _several(subject)} if _several(subject) and port == 0 and port is not False else None


def _gpu_twice(subject: Subject) -> Cases:
    """CUDA then shows no GPU; after a negative number only those before it."""
    chosen = subject.values.get("gpu_ids")
    if not isinstance(chosen, str) or subject.engine is Engine.TPU:
        return None
    numbers = [word.strip() for word in chosen.split(",")]
    repeated = [number for index, number in enumerate(numbers) if number in numbers[:index] and number]
    below_zero = [number for number in numbers if number.startswith("-")]
    what = f"{repeated[0]} twice" if repeated else below_zero[0] if below_zero else ""
    effect = "no GPU at all" if repeated else "the GPUs before it only"
    return {"ids": chosen, "what": what, "effect": effect} if what else None


def _alone(subject: Subject) -> Cases:
    number = subject.number("num_processes")
    if not subject.is_alone or number < 2:
        return None
    return {"word": subject.spelt("distributed_type", "NO"), "number": number}


ROWS = (
    Row(
        "AF401", "error", "num_processes", "num_processes{value}", "accelerate launch stops without --num_processes",
        "num_processes: {number}", _no_processes, seen="launcher",
    ),
    Row(
        "AF402", "error", "num_processes", "{processes} processes don't divide by {machines} machines",
        "each machine starts {each}", "num_processes: {number}", _remainder, seen="P44 launcher accelerate#2818",
    ),
    Row(
        "AF403", "warning", "num_machines", "{machines} machines and no main_process_ip",
        f"under accelerate launch they wait at None:{DEFAULT_PORT}",
        "main_process_ip: the address of machine 0, or --main-process-ip ADDRESS before the script; accel-fsdp launch "
        f"takes it and the machine's number from {listed(PLACING, 'and')}; accel-fsdp script writes their job files",
        _no_address, seen="P46 launcher",
    ),
    Row(
        "AF405", "warning", "use_cpu", "use_cpu does not reach the ranks under {kind}", "it has no effect",
        "use_cpu: false; train/sft.py detects it",
        lambda s: {"kind": s.values.get("distributed_type")} if s.values.get("use_cpu") is True
        and s.engine is not Engine.NONE and s.values.get("distributed_type") != MULTI_CPU else None,
        (Edit("", "use_cpu", False),), seen="P83 launcher",
    ),
    Row("AF407", "error", "{key}", "{key}: {value}", "nothing runs", "{key}: 1 or more", _too_few, seen="launcher"),
    Row(
        "AF408", "warning", "distributed_type", "{starter} does not read this file", "nothing is sharded",
        "accelerate launch --config_file FILE SCRIPT ...", _starter, seen="P50 ms-swift#9980",
    ),
    Row(
        "AF409", "error", "distributed_type", "--{flag} overrides distributed_type: FSDP",
        "FSDP is not used and every GPU holds the whole model", "drop --{flag}",
        lambda s: [{"flag": flag} for flag in OTHER_ENGINES if s.is_fsdp and s.started_with(flag)],
        seen="P08 P41 launcher",
    ),
    Row(
        "AF409", "error", "parallelism_config", "--use_fsdp drops parallelism_config", "the mesh is not built",
        "drop --use_fsdp", lambda s: s.started_with("use_fsdp") and bool(s.section("parallelism_config")),
    ),
    Row(
        "AF411", "error", "machine_rank", "machine_rank: {rank} of {machines}",
        "they wait for a machine with another rank",
        "0 to {last}, one for each: --machine_rank N", lambda s: _other_rank(s, alone=False), seen="torchrun",
    ),
    Row(
        "AF411", "warning", "machine_rank", "machine_rank: {rank} of {machines}", "this machine trains alone",
        "num_machines: all that take part, or machine_rank: 0", lambda s: _other_rank(s, alone=True),
    ),
    Row(
        "AF413", "error", "gpu_ids", "gpu_ids: {ids} and {processes} on each machine", "{why}",
        "gpu_ids: all, or as many ids as processes", _few_ids, seen="P47 launcher ViewDiff#24",
    ),
    Row(
        "AF415", "error", "main_process_ip", "main_process_ip: {address} and {machines} machines",
        "every machine finds itself under it, and all wait",
        "main_process_ip: an address of machine 0 that the others reach", _own_address, seen="P45 accelerate#2816",
    ),
    Row(
        "AF415", "error", "main_process_ip", "main_process_ip: {address} is not an address",
        "no machine of that name is found, and all wait",
        "main_process_ip: 10.0.0.1 or a host's name, without http:// and port", _odd_address,
    ),
    Row(
        "AF415", "error", "main_process_port", "main_process_port: 0 and {machines} machines",
        "each machine takes another free port, and all wait", f"main_process_port: {DEFAULT_PORT}, the same on all",
        _any_port,
    ),
    Row(
        "AF416", "error", "gpu_ids", "gpu_ids: {ids} names {what}", "CUDA offers {effect}",
        "gpu_ids: each GPU once, or all",
        _gpu_twice, seen="P48 cuda",
    ),
    Row(
        "AF417", "note", "num_processes", "distributed_type: {word} starts one process, not {number}",
        "the other GPUs stay idle", "num_processes: 1, or distributed_type: FSDP or MULTI_GPU for all of them", _alone,
        seen="launcher",
    ),
)  # fmt: skip
