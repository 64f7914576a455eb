"""`python .../launch/ranks/__main__.py SCRIPT` runs a script as one rank, with gloo as its FSDP device without a GPU.

The script is not edited. `sys.argv`, `__main__` and `sys.path` are as if Python had been started with it. Torch's
launcher starts it by its path: with `-m` Python would look for this package in the current folder first.
"""

import os
import sys

if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]
    sys.path.append(os.path.abspath(os.path.join(__file__, *[os.pardir] * 4)))

import runpy
import traceback

from accel_fsdp import cpu
from accel_fsdp.errors import UserError
from accel_fsdp.launch.ranks import events, hang, script, watch


def main() -> int:
    """Runs the script whose name and arguments follow; returns its exit code."""
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    cpu.begin_rank()
    tell_end = watch.begin()
    hang.begin()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = _exit_code(ended)
        error = ended.code if isinstance(ended.code, str) else ""
        if code == 0:
            tell_end()
        events.tell("ended", code=code, error=error, line=script.line_of_error(ended))
        return code
    except UserError as error:
        watch.tell_failure(error)
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        watch.tell_failure(error)
        _print_without_runner(error)
        return 1
    tell_end()
    events.tell("ended", code=0, error="", line="")
    return 0


def _exit_code(ended: SystemExit) -> int:
    if isinstance(ended.code, int) or ended.code is None:
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _print_without_runner(error: BaseException) -> None:
    """The traceback as Python would print it, without the frames of this file and of runpy."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


if __name__ == "__main__":
    code = main()
    cpu.finish(code)
    sys.exit(code)
