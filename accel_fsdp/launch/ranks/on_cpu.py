"""Runs any script as one rank on gloo, where there is no GPU, and reports what the rank does."""

import os
import sys

from accel_fsdp import cpu
from accel_fsdp.errors import UserError
from accel_fsdp.launch.ranks import events, hang, script, watch


def run() -> None:
    """Runs the script whose name and arguments follow on the command line, and ends this process."""
    code = _code_of_script()
    cpu.finish(code)
    sys.exit(code)


def _code_of_script() -> int:
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    cpu.begin_rank()
    report_end = watch.begin()
    hang.begin()
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
        return 130
    except BaseException as failure:
        watch.tell_failure(failure)
        script.show_error(failure)
        return 1
    if code == 0:
        report_end()
    events.report("ended", code=code, error=error, line=line)
    return code
