"""A tiny model with a real tokenizer, and real launches of several gloo processes."""

import atexit
import contextlib
import gc
import io
import json
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import hypothesis
import psutil
import pytest
import warm

ROOT = Path(__file__).parent.parent
SFT = ROOT / "train" / "sft.py"
CHAT_DATA = ROOT / "train" / "data" / "fsdp_chat"
LAUNCH_SECONDS = 300
OUTPUT_LETTERS = 3000
"""How much of the end of a launch's output is shown again where it failed: the account of its ranks."""

SHARED = "WARM_SHARED"
"""The variable that names the folder of the server that workers share."""

for number in {signal.SIGINT, signal.SIGHUP}:  # under `nohup … &` they are ignored, which what is started would inherit
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
gc.disable()  # until the tests are collected: a quarter of the time of all imports went into it
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of a thousand processes compiles this package again
sys.dont_write_bytecode = False

# On a busy machine examples take long; a test's folder serves all of its examples.
UNCHECKED = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=UNCHECKED)
hypothesis.settings.load_profile("any machine")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run what is marked slow, too, as `make test-all` does")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever names files or tests gets all of them. Where there are workers, they share a server of warm processes."""
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        config.option.runslow = True
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[SHARED] = start_server()


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """What is marked slow, but for as many cases of a test as its mark says: they are spread over its cases."""
    cases: dict[tuple[pytest.Item | pytest.Collector | None, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            cases.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    left = []
    for same in cases.values():
        but = same[0].get_closest_marker("slow").kwargs.get("but", 0)  # type: ignore[union-attr]  # all have one
        kept = {len(same) * case // but for case in range(but)}
        left += [item for case, item in enumerate(same) if case not in kept]
    return left


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """New files, then those that take longest, so that no worker is left alone with one at the end."""
    if not config.option.runslow:
        left = set(left_out(items))
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    seconds = json.loads((ROOT / "tests" / "durations.json").read_text())
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT).as_posix(), math.inf))


def pytest_collection_finish() -> None:
    gc.freeze()  # or each training in this process looks through all that was imported: two thirds of its time
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Why a fixture failed, once and last: the summary has one line for each of its tests, too short for a launch."""
    yield
    crashes = (getattr(report.longrepr, "reprcrash", None) for report in terminalreporter.getreports("error"))
    for message in dict.fromkeys(crash.message for crash in crashes if crash is not None):
        terminalreporter.section("a fixture failed")
        terminalreporter.write_line(message[-OUTPUT_LETTERS:])
    cold = Path(os.environ.get(SHARED, "")) / warm.COLD
    if cold.is_file():  # each costs ten seconds: a worker's environment has changed
        reasons = Counter(cold.read_text().splitlines())
        terminalreporter.section("programs that had to import their libraries, and the variables that were others")
        terminalreporter.write_line("\n".join(f"{count} x {reason}" for reason, count in reasons.most_common(10)))


@pytest.fixture(autouse=True)
def _same_environment() -> Generator[None]:
    """Variables that the tested code sets in this process, as a rank does for itself, end with the test."""
    with mock.patch.dict(os.environ):
        yield


@dataclass(frozen=True)
class Finished:
    """A process that has ended: exit code and everything it printed, progress bars split into lines.

    `late`: it was killed for taking too long.
    """

    code: int
    output: str
    late: bool = False


def run(words: Sequence[str | Path], **environment: str) -> Finished:
    """Runs a command in a process group of its own and leaves no process behind, also after a timeout.

    Launches and commands start from a process that has imported the libraries already (`warm.py`), unless WARM is 0.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    words = [str(word) for word in words]
    if env.get("WARM", "1") != "0" and words[0] == sys.executable and _may_be_warm(words[1:]):
        env.update(warm_python())
        words[0] = env["PYTHON_EXEC"]
    finished = ended(start(words, env), LAUNCH_SECONDS)
    if finished.late:
        pytest.fail(f"still running after {LAUNCH_SECONDS} s: {words}\n{finished.output[-OUTPUT_LETTERS:]}")
    return finished


def start(words: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Starts a command in a process group of its own; all that it prints comes through one pipe."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )


def ended(process: "subprocess.Popen[str]", seconds: float) -> Finished:
    """What a started command printed; it is killed with all that it started if it takes longer."""
    late = False
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        if process.poll() is not None:
            pytest.fail(f"ended, and what it started has held its output open for {seconds} s: {process.args}")
        late = True
        for child in (*psutil.Process(process.pid).children(recursive=True), process):  # ranks have groups of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        output, _ = process.communicate()
    return Finished(process.returncode, output.replace("\r", "\n"), late)


def _may_be_warm(words: list[str]) -> bool:
    """Not an export: one that has loaded transformers already asks it otherwise."""
    launches = words[:2] in (["-m", "accelerate.commands.launch"], ["-m", "torch.distributed.run"])
    ours = words[:2] == ["-m", "accel_fsdp"] and words[2:3] != ["export"]
    return launches or ours or words[1:2] == ["accel_fsdp.ranks"] or Path(words[0]).suffix == ".py"


def warm_python() -> dict[str, str]:
    """The environment of what starts warm: a stub in Python's place, and the socket of the process that serves it.

    One server is enough for all workers of a run, and for every machine that `hosts` makes: a program starts in the
    namespaces of its stub.
    """
    folder = Path(os.environ[SHARED] if SHARED in os.environ else start_server())
    deadline = time.monotonic() + LAUNCH_SECONDS
    while not (folder / "socket").exists():
        assert folder.exists(), "the server of warm processes didn't start"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {"PYTHON_EXEC": str(folder / "python"), "WARM_SOCKET": str(folder / "socket")}


@cache
def start_server() -> str:
    """Begins to import for programs that start warm; its folder."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    stub, place = folder / "python", folder / "socket"
    stub.write_text(warm.stub_text())
    stub.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WARM_SOCKET": str(place)}
    words = [sys.executable, ROOT / "tests" / "warm.py", place]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, env=env, cwd=ROOT, start_new_session=True)
    atexit.register(end, server, folder)
    return str(folder)


def end(server: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Closes the server's standard input, which ends it."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    shutil.rmtree(folder)


def together(commands: Sequence[Sequence[str | Path]], **environment: str) -> list[Finished]:
    """Runs several commands at the same time."""
    return at_once([partial(run, words, **environment) for words in commands])


def at_once(launches: Sequence[Callable[[], Finished]]) -> list[Finished]:
    """Makes several launches at the same time: those that wait more than they compute."""
    warm_python()  # here, or each of the threads starts a server
    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(lambda launch: launch(), launches))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def accelerate_launch(
    config: Path, script: Path, *args: str | Path, launcher: Sequence[str] = (), **environment: str
) -> Finished:
    """`accelerate launch` as a user types it, on a free port; `launcher` are flags for the launcher itself."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", *launcher]
    return run([*command, "--config_file", config, script, *args], **environment)


def accel_fsdp(*args: str | Path) -> Finished:
    """The console command."""
    return run([sys.executable, "-m", "accel_fsdp", *args])


@contextlib.contextmanager
def files_of_at_most(limit_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond the limit, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def peak_bytes(*words: str | Path) -> int:
    """The most memory that the console command takes in a process of its own, as Linux tells it."""
    script = (
        "import sys; from accel_fsdp import cli\n"
        "try: cli.main()\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    command = [sys.executable, "-c", script, *map(str, words)]
    finished = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
    return int(finished.stdout.split()[-1]) * 1024


@dataclass(frozen=True)
class Called(Finished):
    """A command that ran in this process. `printed` is what went to stdout; `text` is all of it, in one line."""

    printed: str = ""

    @property
    def text(self) -> str:
        return " ".join(self.output.split())


def here(*args: str | Path) -> Called:
    """The console command, in this process: quicker, for what starts no other one."""
    from accel_fsdp import cli, errors

    out, err, codes = io.StringIO(), io.StringIO(), [0]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = errors.guard(lambda: codes.append(cli.call([str(word) for word in args])))
    return Called(code or codes[-1], out.getvalue() + err.getvalue(), printed=out.getvalue())


def planned(*words: str | Path) -> dict[str, Any]:
    """The report of `accel-fsdp plan`, whose exit code says whether anything fits."""
    called = here("plan", *words, "--json")
    assert called.printed, called.output
    report: dict[str, Any] = json.loads(called.printed)
    fits = report["choice"] if "choice" in report else report["fastest"]
    assert called.code == (0 if fits else 1), called.output
    return report


def made_yaml(**flags: str) -> str:
    """The YAML that `accel-fsdp config --yes` writes with these flags."""
    from accel_fsdp.wizard import interview, to_yaml

    return to_yaml.to_text(interview.answers(interview.interview(flags, {}, defaults=True)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer untied Llama with random fp32 weights, odd sizes, and a BPE tokenizer trained on the shipped chats."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=509, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], show_progress=False
    )
    tokenizer.train([str(CHAT_DATA / "train.jsonl")], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=509,
        hidden_size=36,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 rows of plain text."""
    return write_texts(tmp_path_factory.mktemp("data") / "text.jsonl", 48)


def write_texts(path: Path, count: int) -> Path:
    """Rows of plain text of different lengths, taken from the shipped chats."""
    chats = [json.loads(line)["messages"] for line in (CHAT_DATA / "train.jsonl").read_text().splitlines()[:count]]
    texts = [chat[0]["content"][: 40 + 5 * (number % 11)] for number, chat in enumerate(chats)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def sft(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """Runs `train/sft.py` as the only rank of a job in this process: as a launch of one process would, in a second."""
    import runpy

    from accelerate.state import AcceleratorState, GradientState

    from accel_fsdp.errors import guard

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")

    def start(*args: str | Path) -> Finished:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        monkeypatch.setattr("sys.argv", [str(SFT), *map(str, args)])
        code = guard(runpy.run_path(str(SFT), run_name="sft")["main"])
        out, err = capfd.readouterr()
        return Finished(code, out + err)

    return start


@pytest.fixture
def trains(sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path) -> Callable[..., Finished]:
    """Runs the small job with more flags as the only rank, in this process, into `tmp_path / into`."""
    from jobs import sft_args

    def start(
        *more: str | Path, into: str = "run", code: int = 0, model: Path = tiny_model, data: Path = text_data
    ) -> Finished:
        finished = sft(*sft_args(model, data, tmp_path / into, *more))
        assert finished.code == code, finished.output
        return finished

    return start


@pytest.fixture
def launches(tiny_model: Path, text_data: Path, tmp_path: Path) -> Callable[..., Finished]:
    """The same on two ranks, under a YAML of these answers to the wizard; `fails` if it ends with an error."""
    from jobs import make_config, sft_args

    def start(
        *more: str | Path,
        into: str = "run",
        fails: bool = False,
        script: Path = SFT,
        model: Path = tiny_model,
        data: Path = text_data,
        answers: Mapping[str, str] = MappingProxyType({}),
        **environment: str,
    ) -> Finished:
        config = make_config(tmp_path, model, **answers)
        finished = accelerate_launch(config, script, *sft_args(model, data, tmp_path / into, *more), **environment)
        assert (finished.code != 0) == fails, finished.output
        return finished

    return start


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a Llama with a checkpoint of 3 ranks, made in this process."""
    import sharded
    from runs import HEADS, SIZES
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("made") / "run"
    sharded.make(folder, LlamaConfig(**SIZES, **HEADS, dtype="float32"), ranks=3)
    return folder


@pytest.fixture
def run_folder(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))
