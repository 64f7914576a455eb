"""The one error that users see: what is wrong, why it matters, what to type next.

Everything else that escapes is a bug in accel-fsdp and keeps its traceback.
"""

import contextlib
import difflib
import errno
import faulthandler
import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from accel_fsdp.launch_environment import LaunchEnvironment

LET_RANK_ZERO_SPEAK_SECONDS = 3.0
INTERRUPTED = 130
"""The exit code after Ctrl-C."""
LONGEST_SHOWN = 80
"""Letters that are shown of a name that is too long for a file."""
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except tab and line feed, marks that change the direction of text, and halves of characters."""


def printable(text: str) -> str:
    """`text` with escaped control characters, such as \\x1b, because they could move a terminal's cursor.

    Names of tensors, files and keys come from untrusted files. Everything that this package prints goes through here.
    """
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`text` as `printable`, with escaped line feeds, so that a name can't add lines to the output."""
    return printable(text).replace("\n", "\\n")


class UserError(Exception):
    """An error that the user can fix.

    `what` names the thing that is wrong (with its file, line or key), `why` the consequence, `fix` what to type next;
    `table` has lines about what is wrong.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str, fix: str, table: Sequence[str] = ()) -> None:
        self.what, self.why, self.fix, self.table = what, why, fix, table
        super().__init__(what)

    def __reduce__(self) -> tuple[Callable[..., "UserError"], tuple[object, ...]]:
        return _rebuilt, (type(self), self.what, self.why, self.fix, self.table)  # to send it to another process

    def __str__(self) -> str:
        lines = [one_line(self.what), *(f"  {one_line(line)}" for line in self.table)]
        return "error: " + "\n  ".join([*lines, f"why: {one_line(self.why)}", f"fix: {one_line(self.fix)}"])


def _rebuilt(kind: type[UserError], what: str, why: str, fix: str, table: Sequence[str]) -> UserError:
    return kind(what, why=why, fix=fix, table=table)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for a one-line message; for a UserError, its `what`."""
    if isinstance(error, UserError):
        return error.what
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_a_line(error: BaseException) -> str:
    """An error as part of a sentence: the `what` of a UserError, the class and text of any other error."""
    if isinstance(error, UserError):
        return one_line(error.what)
    return f"{type(error).__name__}: {error}"


def joined(what: str, rest: str) -> str:
    """`what` and what follows from it in one line; a question, such as "Did you mean X?", stays a whole sentence."""
    return f"{what} {rest[:1].upper()}{rest[1:]}" if what.endswith("?") else f"{what.rstrip('.')}; {rest}"


class UsageError(UserError):
    """A flag has an invalid value."""

    exit_code = 2


class Stopped(UserError):
    """The job was asked to stop, saved its state and can be resumed. Every rank raises it, and rank 0 prints it."""

    exit_code = 75
    """EX_TEMPFAIL of sysexits.h: a temporary failure, after which the same command can be run again."""

    def __str__(self) -> str:
        return f"stopped: {one_line(self.what)}\n  {one_line(self.why)}\n  next: {one_line(self.fix)}"


LIBRARIES = {
    **dict.fromkeys(
        ("torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "jinja2", "psutil"), "train"
    ),
    **{"safetensors": "train", "deepspeed": "deepspeed", "bitsandbytes": "quant"},
}
"""The libraries that `pip install accel-fsdp` leaves out, and the extra that installs each."""


class NotInstalled(UserError):
    """A command needs a library that the light installation leaves out. Printed in one line, with pip's command."""

    @classmethod
    def of(cls, library: str, purpose: str = "this") -> "NotInstalled":
        return cls(
            f"{purpose} needs {library}, which isn't installed in {sys.prefix}",
            why="the light installation leaves it out",
            fix=f"pip install 'accel-fsdp[{LIBRARIES[library]}]'",
        )

    def __str__(self) -> str:
        return one_line(f"error: {self.what}: {self.fix}")


def require(purpose: str, *libraries: str) -> None:
    """Raises unless all of these libraries are installed; imports none."""
    for library in libraries:
        if not is_installed(library):
            raise NotInstalled.of(library, purpose)


def is_installed(library: str) -> bool:
    from importlib.util import find_spec  # this import takes a tenth of --help's time, as does metadata below

    return find_spec(library) is not None


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """The installed versions of these libraries, without those that are missing; imports none."""
    from importlib import metadata

    versions = {}
    for library in libraries:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed = metadata.distribution(library)
            # Only the version's line: parsing the whole file takes four times as long, a third of a check's time
            line = re.search(r"^Version: *(\S+)", installed.read_text("METADATA") or "", re.MULTILINE)
            versions[library] = line[1] if line else installed.version
    return versions


CHANGE_RESULTS = (
    *("torch", "accelerate", "transformers", "tokenizers", "datasets", "peft", "trl", "safetensors", "numpy"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "deepspeed", "bitsandbytes", "liger-kernel", "flash-attn"),
    *("torchao", "triton", "kernels", "xformers", "flash-linear-attention", "causal-conv1d", "mamba-ssm"),
    "transformer-engine",
)
"""The libraries that a training depends on."""


def versions() -> dict[str, str]:
    """The versions that a run records, and that the machines of a job compare."""
    from accel_fsdp import __version__

    return {"python": platform.python_version(), "accel-fsdp": __version__, **versions_of(CHANGE_RESULTS)}


TESTED = {
    "torch": ("2.11.0", "2.15.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "peft": ("0.21.0", "0.21.2"),
    "datasets": ("4.0.0", "5.2.0"),
}
"""The oldest and the newest version that the tests run with: constraints-oldest.txt and constraints-newest.txt."""


def lacks(library: str, finding: str, why: str) -> UserError:
    """The error for a library with unexpected internals; `finding` continues the sentence after its version."""
    from importlib import metadata

    oldest, newest = TESTED.get(library, ("", ""))
    tested = f"{library}=={newest}" if oldest == newest else f"{library}>={oldest},<={newest}"
    return UserError(
        f"{library} {metadata.version(library)} {finding}",
        why=why,
        fix=f"pip install '{tested}', which is tested" if newest else f"another version of {library}",
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ' Did you mean X?' for the nearest known name, else the empty string."""
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else ""


def nearest(name: str, known: Iterable[str], alike: float = 0.6) -> str:
    """The known name that is most like `name`, else the only one that it begins; empty without one."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=alike)
    longer = [candidate for candidate in by_lower if len(name) > 3 and candidate.startswith(name.lower())]
    near = near or longer * (len(longer) == 1)
    return by_lower[near[0]] if near else ""


def guard(main: Callable[[], None], interrupted: Callable[[], str] = lambda: "interrupted") -> int:
    """Runs `main` and returns its exit code; a `UserError` becomes its three lines on stderr.

    After Ctrl-C the sentence of `interrupted` is printed.

    Ranks usually fail for the same reason, so the other ranks of a node wait for rank 0's message: the launcher ends
    them once rank 0 has failed. A rank that is still alive afterwards failed for a different reason and prints it.
    """
    try:
        main()
    except Stopped as error:
        report_to_launcher(error)
        if LaunchEnvironment.now().rank == 0:
            print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except UserError as error:
        launch = LaunchEnvironment.now()
        if hasattr(faulthandler, "unregister"):  # not on Windows
            faulthandler.unregister(signal.SIGTERM)  # a rank that waits to print its message leaves no stack
        if launch.local_rank != 0:
            time.sleep(LET_RANK_ZERO_SPEAK_SECONDS)
        report_to_launcher(error)
        if launch.local_rank != 0:
            print(f"[rank {launch.rank}]", end=" ", file=sys.stderr)
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except ImportError as error:  # importlib.metadata's PackageNotFoundError is one
        if (not_importable := _not_importable(error)) is None:
            raise
        print(not_importable, file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(_too_long(error), file=sys.stderr, flush=True)
        return UsageError.exit_code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends an exit that hangs, without a traceback
        exec(
            ""
        )  # `python -m` ends by SIGINT, not with a code, if the last exec of text, a dataclass's, was interrupted
        if LaunchEnvironment.now().local_rank == 0:
            print(f"\n{interrupted()}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _not_importable(error: ImportError) -> UserError | None:
    """The error for a missing library, or one without the imported module or name."""
    module = error.name or ""
    library = module.partition(".")[0]
    if library not in LIBRARIES:
        return None
    match = re.match(r"(cannot import name|No module named) '([\w.]+)'", str(error))
    if match and match[1].startswith("cannot"):
        return lacks(library, f"has no {module}.{match[2]}", "the command needs it")
    if match and match[2] != library:
        return lacks(library, f"has no {module}", "the command needs it")
    return NotInstalled.of(library) if isinstance(error, ModuleNotFoundError) else None


def _too_long(error: OSError) -> UsageError:
    """The error for a name that is too long for a file, in whichever command it appears first."""
    name = str(error.filename)
    short_name = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..."
    return UsageError(
        f"cannot open {short_name}: {error.strerror}", why="no file has that name", fix="give a shorter name"
    )


@contextlib.contextmanager
def to_stdout() -> Iterator[None]:
    """Turns errors of writing to stdout, such as a full disk, into a `UserError`. Wrap it around printing."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # closed by the shell: >&-
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise  # an error of another file
        _forget_stdout()
        raise UserError(
            f"cannot write to stdout: {error.strerror or error}",
            why="the output of the command is lost",
            fix="send it to another place, or make room there",
        ) from error


def _forget_stdout() -> None:
    """Drops buffered output: otherwise Python tries to write it again at its end, and fails again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def report_to_launcher(error: UserError) -> None:
    """Writes the message to the error file of torch's launcher, which then ends its failure report with it.

    Otherwise that report is 40 lines that refer to a page about tracebacks.
    """
    if path := LaunchEnvironment.now().error_file:
        extra = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            with open(f"{path}.tmp", "w", encoding="utf-8") as file:
                json.dump({"message": {"message": error.what, "extraInfo": extra}}, file)
            os.replace(f"{path}.tmp", path)  # the launcher fails on half a file
