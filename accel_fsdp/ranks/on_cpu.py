"""Runs any script as one rank on gloo, where there is no GPU, and reports what the rank does."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from accel_fsdp.errors import INTERRUPTED, UserError
from accel_fsdp.launch_environment import LaunchEnvironment
from accel_fsdp.ranks import cpu, events, gpu_as_cpu, hang, recording, replay, script, small, watch
from accel_fsdp.ranks.observing import before


def run() -> None:
    """Runs the script whose name and arguments follow on the command line, and ends this process."""
    del sys.argv[0]
    script.begin()
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    cpu.begin_rank()
    if cpu.is_needed():
        gpu_as_cpu.install()
        keep_closed_groups()
    small.install()
    recorder = recording.begin()  # before the watch, whose functions check whether the script itself is the caller
    report_end = watch.begin() if os.environ.get(events.EVENTS) else lambda: None
    if recorder is not None:
        cpu.at_end(partial(replay.compare, recorder))
    hang.begin()
    code = _code_of_script(report_end)
    cpu.finish(code)
    if LaunchEnvironment.now().is_rank and cpu.is_needed():
        cpu.leave(code)  # the script has closed its process group, but torch's threads may still abort the teardown
    sys.exit(code)


def keep_closed_groups() -> None:
    """Keeps a process group that the script closes, until the script opens another one or the process ends.

    Otherwise a DDP model that outlives the group would delete it. In that, torch 2.13 holds Python's lock while it
    waits for gloo's threads, one of which may wait for the lock to release a collective that has just ended: a
    deadlock. 3,000 such models made one after the other end with torch 2.11 and 2.15, and hang within 100 with 2.13.
    """
    import torch.distributed as dist

    kept: list[Any] = []
    before(dist, "destroy_process_group", lambda *_, **__: kept.append(dist.group.WORLD))
    before(dist, "init_process_group", lambda *_, **__: kept.clear())


def _code_of_script(report_end: Callable[[], None]) -> int:
    code, error, line = 0, "", ""
    try:
        script.run(sys.argv[0])
    except SystemExit as ended:
        line = script.line_of_error(ended)
        if isinstance(ended.code, int | None):
            code = ended.code or 0
        else:
            code, error = 1, str(ended.code)
            print(error, file=sys.stderr)
    except UserError as refusal:
        watch.tell_failure(refusal)
        print(refusal, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as failure:
        watch.tell_failure(failure)
        script.show_error(failure)
        return 1
    if code == 0:
        report_end()
    events.report("ended", code=code, error=error, line=line)
    return code
