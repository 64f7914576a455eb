"""Processes that start with torch and transformers already imported: most of a launch's time is that.

`python tests/warm.py SOCKET` imports what training and Accelerate's launcher need, then forks a process for each
program that the stub of `stub_text` asks for, with the stub's arguments, environment, folder and open files. What runs
is the same program in a process of its own, in the stub's namespaces. A program whose environment differs from the
server's in anything that libraries may read while they are imported is started by the stub itself, as usual; the file
COLD beside the socket says which variables differed.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import multiprocessing.spawn
import os
import platform
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import traceback
import weakref
from pathlib import Path
from typing import NoReturn

MODULES = (
    *("torch.distributed.run", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("accelerate.commands.launch", "datasets", "peft", "transformers.models.llama.modeling_llama"),
    *(
        "transformers.models.auto.modeling_auto",
        "transformers.trainer_pt_utils",
        "transformers.tokenization_utils_base",
    ),
    *("torch.distributed.checkpoint.state_dict", "torch.optim.adamw", "torch.nn.parallel.distributed"),
)
READ_LATER = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_", "CUDA_VISIBLE_"),
    *("FSDP_", "ACCELERATE_", "ACCEL_FSDP_", "PARALLELISM_CONFIG_", "DS_", "WARM_", "PYTEST_", "PYTHON_EXEC", "BEFORE"),
    *(
        "COLUMNS",
        "LINES",
        "PWD",
        "OLDPWD",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "GLOO_",
        "NCCL_",
        "NVIDIA_TF32_",
        "_",
    ),
    *("PET_", "SKYPILOT_", "SLURM", "SRUN_", "ENVIRONMENT", "HOSTNAME", "SHLVL", "PS1"),
    *("ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
    "PYTORCH_ALLOC_CONF",  # of CUDA's allocator, which no test has
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD",
    *(
        "XDG_CACHE_HOME",
        "TOKENIZERS_PARALLELISM",
        "FILL",
        "SEVERAL",
        "PROBE_",
        "KILL_",
        "AWS_",
        "SCARCE",
        "ASK_FOR_CPU",
    ),
    *("HANG", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PYTORCH_NVML_BASED_CUDA_CHECK", "TMPDIR"),
    *("KINETO_", "TORCH_FR_"),  # which torch sets in a worker that imported them
)
"""How the names of variables begin that programs read when they run, not when they are imported."""
WHILE_IMPORTING = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""With the last two, torch.cuda is asked for GPUs without a call of CUDA's driver, after which no fork may use it."""
COLD = "cold"
HUGE_PAGE, MADV_COLLAPSE = 1 << 21, 25
LENGTH = 8
MOST_FILES = 64
NAMESPACES = {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""Names in /proc/PID/ns and Linux's CLONE_NEW flags, in the order in which a process can enter them."""


def stub_text() -> str:
    """A program to be used as a Python interpreter: hands its arguments, environment and files to the server."""
    return f"""#!{sys.executable} -ISE
import json, os, signal, socket, sys

def is_handed_on(number):
    try:
        return os.get_inheritable(number)
    except OSError:  # it listed the others
        return False

files = [0, 1, 2, *(number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and is_handed_on(number))]
asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd(), files]).encode()
try:
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["WARM_SOCKET"])
    socket.send_fds(server, [len(asked).to_bytes({LENGTH}, "big")], files)
    server.sendall(asked)
    taken = server.recv(1)
except (OSError, KeyError):
    taken = b""
if taken != b"y":
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
for number in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE}}:
    signal.signal(number, lambda got, _: server.sendall(bytes([got])))
answer = server.recv(4)
if not answer:
    sys.exit("the server of warm processes is gone")
status = int.from_bytes(answer, "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:  # its handling can't be changed
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else 1)
"""


class Namespaces:
    """Those of a process that are not this one's."""

    def __init__(self, process: int) -> None:
        """Opens them, so that they stay if the process ends."""
        self.files: dict[str, int] = {}
        for name in NAMESPACES:
            if os.readlink(f"/proc/{process}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
                self.files[name] = os.open(f"/proc/{process}/ns/{name}", os.O_RDONLY)

    def fork(self) -> int:
        """Forks; the child is in them. A process can't change its own pid namespace, only that of its children."""
        pid, own = self.files.get("pid"), os.open("/proc/self/ns/pid", os.O_RDONLY)
        if pid is not None:
            _enter(pid, NAMESPACES["pid"])
        child = -1
        try:
            child = os.fork()
        finally:
            if child != 0:
                _enter(own, NAMESPACES["pid"])
            os.close(own)
        if child == 0:
            try:
                for name in [name for name in self.files if name != "pid"]:
                    _enter(self.files[name], NAMESPACES[name])
            except OSError:
                os._exit(1)
            self.close()
        return child

    def close(self) -> None:
        for file in self.files.values():
            os.close(file)


def _enter(file: int, kind: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, kind) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Server:
    """Accepts programs, forks them, hands signals on to them and their exit status back."""

    def __init__(self, path: Path, before: dict[str, str]) -> None:
        """`before`: the environment in which the imports began."""
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.cold = path.with_name(COLD)
        self.set_by_imports = {name: value for name, value in os.environ.items() if name not in before}
        self.environment = self.relevant(before)

    def run(self) -> None:
        """Serves until its standard input closes, which the tests hold open."""
        self.selector.register(0, selectors.EVENT_READ, lambda: os._exit(0))
        while True:
            for key, _ in self.selector.select():
                key.data()

    def relevant(self, environment: dict[str, str]) -> dict[str, str]:
        """What libraries may have read while they were imported."""
        skipped = (*READ_LATER, *self.set_by_imports)
        kept = {name: value for name, value in environment.items() if not name.startswith(skipped)}
        paths = sorted(set(kept.get("PYTHONPATH", "").split(os.pathsep)))  # DeepSpeed's launcher adds what is there
        return {**kept, "PYTHONPATH": os.pathsep.join(paths)}

    def accept(self) -> None:
        """Starts one program, or leaves it to the stub."""
        client, _ = self.listener.accept()
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(client, LENGTH, MOST_FILES)
            size, asked = int.from_bytes(head, "big"), b""
            while len(asked) < size:
                if not (part := client.recv(size - len(asked))):
                    raise OSError("the stub was killed")
                asked += part
            words, environment, folder, numbers = json.loads(asked)
            by_number = dict(zip(numbers, files, strict=True))
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            namespaces = Namespaces(struct.unpack("3i", peer)[0])
        except (OSError, ValueError):
            client.close()
        else:
            self.start(client, namespaces, by_number, words, environment, folder)
            namespaces.close()
        for descriptor in files:  # or whoever reads the stub's output would wait for this server's end
            os.close(descriptor)

    def start(
        self,
        client: socket.socket,
        namespaces: Namespaces,
        files: dict[int, int],
        words: list[str],
        environment: dict[str, str],
        folder: str,
    ) -> None:
        if self.relevant(environment) != self.environment:
            odd = self.relevant(environment).items() ^ self.environment.items()
            with self.cold.open("a") as file:
                file.write(f"{sorted({name for name, _ in odd})} {words[:3]}\n")
            with contextlib.suppress(OSError):
                client.sendall(b"n")
            return
        try:
            child = namespaces.fork()
        except OSError:  # its machine was switched off
            client.close()
            return
        if child == 0:
            self.selector.close()
            self.listener.close()
            client.close()
            become(files, words, {**self.set_by_imports, **environment}, folder)
        self.watch(client, child)

    def watch(self, client: socket.socket, child: int) -> None:
        """Waits for the program's end beside everything else."""
        with contextlib.suppress(OSError):  # the stub was killed
            client.sendall(b"y")
        ended = os.pidfd_open(child)

        def hand_on() -> None:
            if client.fileno() < 0:  # the program ended at the same time
                return
            try:
                numbers = client.recv(64)
            except ConnectionResetError:  # the stub was killed before it read an answer
                numbers = b""
            for number in numbers or [signal.SIGKILL]:
                try:
                    os.killpg(child, number)
                except ProcessLookupError:  # it has been forked, and leads no group yet
                    os.kill(child, number)
            if not numbers:
                self.selector.unregister(client)

        def report() -> None:
            _, status = os.waitpid(child, 0)
            self.selector.unregister(ended)
            os.close(ended)
            if client in self.selector.get_map():
                self.selector.unregister(client)
            with contextlib.suppress(OSError):  # the stub was killed
                client.sendall(status.to_bytes(4, "big"))
            client.close()

        self.selector.register(client, selectors.EVENT_READ, hand_on)
        self.selector.register(ended, selectors.EVENT_READ, report)


def become(files: dict[int, int], words: list[str], environment: dict[str, str], folder: str) -> NoReturn:
    """This forked process becomes the program: its files under their numbers, folder, environment, arguments."""
    os.setsid()
    above = max(*files, *files.values()) + 1
    apart = {place: fcntl.fcntl(file, fcntl.F_DUPFD, above) for place, file in files.items()}
    for file in files.values():
        os.close(file)
    for place, file in apart.items():
        os.dup2(file, place)
        os.close(file)
    import numpy as np

    os.chdir(folder)
    tempfile.tempdir = None
    platform._uname_cache = None  # type: ignore[attr-defined]  # another machine has another name
    random.seed()  # processes that start alone have each their own
    np.random.seed()
    os.environ.clear()
    os.environ.update(environment)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for name, place, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(place, mode, encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        if "-u" in words[:1] and mode == "w":
            stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)  # what it starts is warm too
    multiprocessing.spawn.set_executable(sys.executable)
    code = 1
    try:
        code = execute(words[1:] if words[:1] == ["-u"] else words)
    finally:
        leave(code)


def leave(code: int) -> NoReturn:
    """As an interpreter ends: exit handlers, then the streams."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def execute(words: list[str]) -> int:
    """Runs `-m MODULE`, `-c CODE` or a script to its end; the exit code."""
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            sys.modules.pop(words[1], None)  # it runs again, as the program
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def use_huge_pages() -> None:
    """Makes huge pages of what was imported, as far as the kernel can: a fork copies the table of pages."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in place.split("-"))
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                madvise(page, HUGE_PAGE, MADV_COLLAPSE)


def main() -> None:
    """Imports, then serves."""
    before = dict(os.environ)
    os.environ.update(WHILE_IMPORTING)
    for name in MODULES:
        __import__(name)
    from accel_fsdp import cli, linter, rehearsal
    from accel_fsdp.rehearsal import preload  # noqa: F401
    from accel_fsdp.training import data  # noqa: F401
    from accel_fsdp.training.reporting import progress  # noqa: F401

    _ = cli.main, linter.lint, rehearsal.rehearse  # each loads what it needs

    with contextlib.suppress(ImportError):  # Accelerate imports it to unwrap any model
        import deepspeed  # noqa: F401
    for name in WHILE_IMPORTING:
        os.environ.pop(name)
    gc.collect()
    gc.freeze()  # or each program would look through all that was imported whenever it collects garbage
    for left in weakref.finalize._registry:  # type: ignore[attr-defined]
        left.atexit = False  # torch would take its operators apart at the end of each program
    use_huge_pages()
    Server(Path(sys.argv[1]), before).run()


if __name__ == "__main__":
    main()
