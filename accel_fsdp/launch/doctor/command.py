"""The command `accel-fsdp doctor`: examines this machine and reports problems; or has the links of a job measured."""

import json
from dataclasses import asdict
from pathlib import Path

from accel_fsdp import command_line, console
from accel_fsdp.errors import UsageError
from accel_fsdp.launch import LaunchCommand, place
from accel_fsdp.launch.doctor import facts, machine, report
from accel_fsdp.launch.doctor.flags import DoctorCommand

BANDWIDTH = Path(__file__).with_name("bandwidth.py")


def of_links(options: DoctorCommand) -> LaunchCommand:
    """The launch that measures the links of a job."""
    assert options.bandwidth
    return LaunchCommand(
        file=options.bandwidth, script=BANDWIDTH, **{name: getattr(options, name) for name in place.FLAGS}
    )


def examine(options: DoctorCommand) -> int:
    """Examines this machine and prints the report; returns 1 if something would stop a job."""
    if options.json and options.report:
        raise UsageError("--json and --report", why="each is a form of the same report", fix="give one of them")
    if flag := next((command_line.flag_of(name) for name in place.FLAGS if getattr(options, name) is not None), ""):
        why, fix = "one machine is examined, and it needs no place", f"accel-fsdp doctor --bandwidth FILE {flag}"
        raise UsageError(f"{flag} without --bandwidth", why=why, fix=fix)
    with console.waiting("examining this machine"):
        here = facts.look(options.folder)
        rows = machine.judge(here)
    verdicts = {row.verdict for row in rows}
    if options.json:
        content = {"healthy": verdicts == {"ok"}, "rows": [asdict(row) for row in rows], "facts": asdict(here)}
        console.put(json.dumps(content, indent=2), lines=True)
    elif options.report:
        console.put(report.for_bug_report(rows, here), lines=True)
    else:
        report.show(rows)
    return 1 if "error" in verdicts else 0
