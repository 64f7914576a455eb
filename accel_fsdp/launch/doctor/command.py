"""The command `accel-fsdp doctor`: examines this machine, connects to the others, and reports problems."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accel_fsdp import console, flag_words
from accel_fsdp.config import DEFAULT_PORT, ReadConfig, read_config
from accel_fsdp.errors import UsageError, UserError, require
from accel_fsdp.launch import Address, agreement, place, rendezvous
from accel_fsdp.launch.doctor import between, facts, machine, report
from accel_fsdp.launch.doctor.flags import DoctorCommand
from accel_fsdp.launch.doctor.network_tests import MachineGroup, NetworkTests
from accel_fsdp.launch.doctor.report import Examination
from accel_fsdp.launch.doctor.rows import Row, is_healthy, of_error
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.linter import LintOptions, lint
from accel_fsdp.models import first_line
from accel_fsdp.units import counted

MOST_RANKS_ON_CPU = 8
OF_A_MACHINE = ("gpu_ids", "rdzv_backend", "same_network")
"""Keys of a YAML that may differ between machines, beside those of its place."""
OTHER_FIRST_SECONDS = 5.0
"""Seconds that machine 0 looks for another machine 0, if the job's address isn't one of its own."""


def examine(options: DoctorCommand) -> int:
    """Examines everything and prints the report; returns 1 if something would stop a job."""
    launched = LaunchEnvironment.now()
    _check(options, launched)
    if launched.is_rank and launched.local_rank != 0:
        return 0  # one process of each machine is enough
    read, unread = _read(options)
    values = read[0].values if read else {}
    own_place, rows = _place(options, values, launched)
    number = int(own_place.value("machine_rank", 0))
    with console.waiting("examining this machine"):
        own_facts = facts.look(options.folder, _job_settings(own_place, values))
    rows += [replace(row, machine=number) for row in (_lint(options, own_place, read) if read else unread)]
    examination = Examination(number, own_place.machines, rows)
    examination.results.facts = {number: own_facts}
    group = _group(options, own_place, launched, len(own_facts.gpus))
    if group is not None:
        _test_network(options, group, own_facts, examination)
    if not examination.has_judged:
        examination.rows[:0] = _judged_rows(examination)
    examination.healthy = examination.healthy and is_healthy(examination.rows)
    if options.json:
        console.put(report.as_json(examination), lines=True)
    elif options.report:
        console.put(report.for_bug_report(examination), lines=True)
    else:
        report.show(examination)
    return 0 if examination.healthy else 1


LIMITS = {
    "timeout": (1, 86_400, "machines need some time to start, and a day is enough"),
    "num_machines": (1, 100_000, "a job has at least one"),
    "num_processes": (1, 10_000_000, "a job has at least one"),
    "main_process_port": (1, 65_535, "ports have these numbers"),
}


def _check(options: DoctorCommand, launched: LaunchEnvironment) -> None:
    for name, (minimum, maximum, why) in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not minimum <= value <= maximum:
            flag = flag_words.flag_of(name)
            raise UsageError(f"{flag} {value}", why=why, fix=f"{flag} N, from {minimum} to {maximum}")
    if options.json and options.report:
        raise UsageError("--json and --report", why="each is a form of the same report", fix="give one of them")
    flags = [name for name in place.FLAGS if getattr(options, name) is not None]
    if launched.is_rank and flags:
        flag = flag_words.flag_of(flags[0])
        raise UsageError(f"{flag} under a launcher", why="the launcher sets it already", fix=f"leave out {flag}")


def _place(
    options: DoctorCommand, values: Mapping[str, Any], launched: LaunchEnvironment
) -> tuple[place.Place, list[Row]]:
    """This machine's number and the number of machines, with errors for contradictions."""
    try:
        engine = place.now()
        if launched.is_rank:
            return _launcher_place(launched), _unapplied_settings(engine, values, launched)
        if launched.has_config and engine.machines > 1:
            return place.NOWHERE, _unapplied_settings(engine, values, launched)
        flags = {name: getattr(options, name) for name in place.FLAGS}
        settled = place.settle(engine, flags, values, str(options.file or "this job"))
    except UserError as error:
        return place.NOWHERE, [of_error("job", error)]
    wrong = [name for name in ("num_machines", "num_processes") if int(settled.value(name, 1)) < 1]
    if settled.machines > 1 and not settled.value("main_process_ip"):
        why, fix = "the machines have no rendezvous address", "--main-process-ip ADDRESS: the address of machine 0"
        return place.NOWHERE, [Row("job", "error", "the address of machine 0 is unknown", why, fix)]
    if wrong:
        what, why = f"{wrong[0]} {settled.value(wrong[0])}", "a job has at least one"
        return place.NOWHERE, [Row("job", "error", what, why, f"a number above 0 in {settled.known[wrong[0]].source}")]
    return settled, []


def _launcher_place(launched: LaunchEnvironment) -> place.Place:
    values = {
        "num_machines": place.SourcedValue(launched.machines, "GROUP_WORLD_SIZE"),
        "num_processes": place.SourcedValue(launched.world_size, "WORLD_SIZE"),
        "machine_rank": place.SourcedValue(launched.machine_rank, "GROUP_RANK"),
        "main_process_ip": place.SourcedValue(launched.main_address, "MASTER_ADDR"),
        "main_process_port": place.SourcedValue(launched.main_port, "MASTER_PORT"),
    }
    return place.Place("torchrun", values)


def _unapplied_settings(engine: place.Place, values: Mapping[str, Any], launched: LaunchEnvironment) -> list[Row]:
    """Reports settings of the engine and the YAML that the launcher of this process did not apply."""
    rows = []
    for name, started in (("num_machines", launched.machines), ("num_processes", launched.world_size)):
        of_engine, in_file = engine.known.get(name), place.SourcedValue(values.get(name), "the YAML")
        for expected in (of_engine or in_file, in_file):
            fewer = of_engine and of_engine.at_most and isinstance(expected.value, int) and started < expected.value
            if isinstance(expected.value, int) and expected.value != started and not fewer:
                what = f"{expected.source} says {name} {expected.value}, and the launcher started {started}"
                why = "each machine would train alone, or ranks would wait for others that never start"
                rows.append(Row("job", "error", what, why, "accel-fsdp launch FILE SCRIPT, which reads both"))
                break
    return rows


def _job_settings(here: place.Place, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the job on this machine, without those that may differ between machines."""
    machine_flags = (*place.FLAGS, *OF_A_MACHINE)
    in_file = {name: value for name, value in agreement.flat(values).items() if name not in machine_flags}
    return in_file | {
        name: stated.value for name, stated in here.known.items() if name in ("num_machines", "num_processes")
    }


def _read(options: DoctorCommand) -> tuple[ReadConfig | None, list[Row]]:
    if options.file is None:
        return None, []
    try:
        return read_config(options.file), []
    except UserError as error:
        return None, [of_error("YAML", error)]


def _lint(options: DoctorCommand, here: place.Place, read: ReadConfig) -> list[Row]:
    """The linter's findings for the file on this machine, with the job's numbers of machines and processes."""
    job, document = read
    assert options.file is not None
    try:
        findings = lint(options.file, LintOptions(), read=(here.applied(job), document))
    except UserError as error:
        return [of_error("YAML", error)]
    rows = [
        Row(finding.code, finding.severity, finding.what, finding.why, finding.fix)
        for finding in findings
        if finding.severity in ("error", "warning")
    ]
    return rows or [Row("YAML", "ok", "the linter finds nothing that this machine contradicts")]


def _judged_rows(examination: Examination) -> list[Row]:
    return [
        replace(row, machine=number)
        for number, machine_facts in sorted(examination.results.facts.items())
        for row in machine.judge(machine_facts, examination.machines > 1, examination.results.communicated)
    ]


def _group(options: DoctorCommand, here: place.Place, launched: LaunchEnvironment, gpus: int) -> MachineGroup | None:
    """The machines and ranks to test together; None for a single one."""
    processes = int(here.value("num_processes", gpus * here.machines or here.machines))
    per_machine = max(processes // here.machines, 1)
    per_machine = min(per_machine, gpus or MOST_RANKS_ON_CPU)
    if here.machines * per_machine < 2:
        return None
    number = int(here.value("machine_rank", 0))
    address = Address(
        str(here.value("main_process_ip", "")),
        int(here.value("main_process_port", DEFAULT_PORT)),
        hosts=number == 0 and not launched.has_store,
    )
    if here.machines == 1:
        address = Address("127.0.0.1", 0, hosts=True)
    return MachineGroup(address, number, here.machines, per_machine, bool(gpus), float(options.timeout))


def _test_network(
    options: DoctorCommand, group: MachineGroup, own_facts: facts.Facts, examination: Examination
) -> None:
    """Tests the connections between machines and ranks, and adds the results to the report."""
    is_single = group.machines == 1
    tests = None
    try:
        require("testing the communication of ranks", "torch")
        with console.waiting(
            "testing the communication of ranks" if is_single else f"connecting {counted(group.machines, 'machine')}"
        ):
            if not is_single:
                rendezvous.check_place(group.address.host, group.address.port, 0 if group.address.hosts else 1)
                _refuse_second_first(group)
            tests = NetworkTests(group)
            tests.gather(own_facts, options.folder)
            tests.test_network()
    except UserError as error:
        examination.rows.append(of_error("machines", error))
        return
    except RuntimeError as error:
        examination.rows.append(_unreachable(group, tests, error))
        return
    if group.machine == 0:
        examination.results, examination.has_judged = tests.results, True
        examination.rows += [*_judged_rows(examination), *between.judge(examination.results)]
    try:
        examination.healthy = tests.end(is_healthy(examination.rows))
        examination.results.communicated = tests.results.communicated
    except RuntimeError as error:
        examination.rows.append(_unreachable(group, tests, error))


def _refuse_second_first(group: MachineGroup) -> None:
    """Raises if another machine already listens as machine 0."""
    host, port = group.address.host, group.address.port
    seconds = 0.0 if rendezvous.is_own(host) else OTHER_FIRST_SECONDS  # another machine 0 may not listen yet
    if group.address.hosts and not rendezvous.wait_for(host, port, seconds):
        raise UserError(
            f"this machine was started as machine 0, but another machine 0 already runs at {host}",
            why="both would wait for others; a variable such as $SLURM_NODEID may have been expanded on one machine",
            fix="srun --ntasks-per-node=1 accel-fsdp doctor FILE; or --machine-rank N, another on each machine",
        )


def _unreachable(group: MachineGroup, tests: NetworkTests | None, error: RuntimeError) -> Row:
    subject = f"machine 0 at {group.address}"
    first = first_line(error)
    if tests is not None:
        what, why = f"{subject} answered, and doesn't any more: {first}", "it ended, or the network broke"
        return Row("machines", "error", what, why, "look at the report of machine 0")
    fix = "open the port, or another --main-process-port"
    if "refused" in first:
        fix = "accel-fsdp doctor on machine 0 at the same time"
    return Row("machines", "error", f"{subject} doesn't answer: {first}", rendezvous.why_unreached(first), fix)
