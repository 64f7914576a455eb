"""Damaged models, checkpoints and configs against every command: `python benchmarks/fuzz.py [--count 2000]`.

Each case damages one file of a model, an adapter, an export or a run of checkpoints (flipped bits, cut ends, values of
other types, huge numbers, deep nesting, links, FIFOs, code to run), and gives the folder to one command in a process of
its own, with "y" on stdin. A case fails where a traceback is shown, code of the folder runs, memory passes 1 GB or time
passes 10 s. `--case N` runs one case again and shows what it printed.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_fsdp.units import GIB

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", COLUMNS="200", ACCELERATE_USE_CPU="true")

ROOT = Path(__file__).parent.parent
MOST_BYTES, MOST_SECONDS = GIB, 10.0
HANGS_SECONDS = 60.0
"""Of the wall: a machine that does other work beside it must not fail a case."""
TRACEBACK = 70
"""Exit code of a child that ended in an exception."""
EVIL = 'import os; open(os.environ["FUZZ_MARK"], "a").write("ran")\nclass Evil:\n    pass\n'
AUTO_MAP = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "evil.Evil")}
ESCAPES = ("\x1b[31mred", "\x1b[2J")
"""Planted; transformers colours some words of its own."""
ODD: list[Any] = [
    *(None, True, -1, 0, 3, 10**8, 10**30, -(10**30), 1e308, "big", "", ESCAPES[0], "/dev/zero", "../../x", [], {}),
    *([1, 2], [[]], {"a": 1}, [None], ["x"] * 100, {"x": {"y": None}}, "bfloat16", "evil.Evil", float("nan")),
]


@dataclass(frozen=True)
class Target:
    """A file that gets damaged, and the commands that read its folder: `{}` is the folder, `{out}` a new one."""

    file: str
    commands: tuple[str, ...]


MODEL = (
    "check good.yaml --model {}",
    "config --yes --model {} --gpus 8xH100-80GB -o {out}",
    "plan --model {} --gpus 8xH100-80GB --json",
    "export {} {out} --verify bytes",
    "export {} {out}",
    "export --check {}",
    "train {}",
)
RUN = (
    "export {} {out} --verify bytes",
    "export {}/checkpoint-2 {out}",
    "export --list {}",
)
ADAPTER = ("export {} {out} --merge-adapter --verify bytes", "export {} {out}")
YAML = ("check {}/job.yaml", "check {}/job.yaml --json", "plan --model gpt2 --gpus 2xA100 --config {}/job.yaml")
YAML_MORE = ("migrate {}/job.yaml --to zero3 --dry-run", "launch --dry-run {}/job.yaml good.yaml")
TARGETS = (
    *(Target(f"model/{name}", MODEL) for name in ("config.json", "config.json", "tokenizer.json")),
    *(Target(f"model/{name}", MODEL) for name in ("tokenizer_config.json", "generation_config.json")),
    *(Target(f"model/{name}", MODEL) for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors")),
    Target("model/export.json", ("export --check {}", "export {} {out}")),
    *(Target(f"run/checkpoint-2/{name}", RUN) for name in ("complete.json", "complete.json", "trainer_state.json")),
    Target("run/checkpoint-2/pytorch_model_fsdp_0/.metadata", RUN),
    Target("run/model/config.json", RUN),
    Target("run/run.json", RUN),
    *(Target(f"adapter/{name}", ADAPTER) for name in ("adapter_config.json", "adapter_model.safetensors")),
    Target("pth/pytorch_model_fsdp.bin", RUN[:1]),
    *(Target("yaml/job.yaml", (text,)) for text in (*YAML, *YAML_MORE)),
)


def build(folder: Path) -> None:
    """What gets damaged: a small Llama, its adapter, a run with a sharded checkpoint, and a full state dict."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.checkpoint import FileSystemWriter, save
    from transformers import LlamaForCausalLM

    from accel_fsdp import exporter
    from accel_fsdp.checkpoints import Origin, completeness

    model = small_llama()
    model.save_pretrained(folder / "saved", max_shard_size="40KB")
    small_tokenizer().save_pretrained(folder / "saved")
    exporter.run(exporter.ExportCommand(folder / "saved", folder / "model", verify="bytes", max_shard_size="40KB"))
    evil = EVIL.encode()
    checkpoint = folder / "run" / "checkpoint-2"
    completeness.begin(checkpoint)
    save({"model": model.state_dict()}, storage_writer=FileSystemWriter(checkpoint / "pytorch_model_fsdp_0"))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": []}))
    completeness.seal(checkpoint, Origin("FSDP"))
    shutil.copytree(folder / "saved", folder / "run" / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    (folder / "run" / "run.json").write_text(json.dumps({"arguments": {"model_name_or_path": str(folder / "saved")}}))
    (folder / "pth").mkdir()
    torch.save(model.state_dict(), folder / "pth" / "pytorch_model_fsdp.bin")
    shutil.copy(folder / "saved" / "config.json", folder / "pth")
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(folder / "saved"),
        LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(folder / "adapter")
    (folder / "yaml").mkdir()
    for yaml in (folder / "yaml" / "job.yaml", folder / "good.yaml"):
        shutil.copy(ROOT / "accelerate_configs" / "fsdp2.yaml", yaml)
    for each in ("model", "run/model", "adapter", "pth", "run/checkpoint-2"):
        (folder / each / "evil.py").write_bytes(evil)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"one two three {n}"}) + "\n" for n in range(8)))


def small_llama() -> Any:
    """Two layers, tied to nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **sizes))


def small_tokenizer() -> Any:
    """Of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["one two three"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def flip(content: bytes, rng: random.Random) -> bytes:
    """One to eight flipped bits, near the beginning in every other case."""
    changed, most = bytearray(content), min(len(content), 600) if rng.random() < 0.5 else len(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(max(1, most))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    """Its end is missing, or a part within."""
    at = rng.randrange(len(content) + 1)
    return content[:at] if rng.random() < 0.5 else content[:at] + content[at + rng.randrange(1, 64) :]


def strange(content: bytes, rng: random.Random) -> bytes:
    """Something else altogether."""
    return rng.choice(
        [
            *(
                b"",
                b"null",
                b"[]",
                b"{}",
                b'"text"',
                b"\xff\xfe\x00",
                b"[" * 200_000,
                b'{"a":' * 50_000,
                b"}" * 3_000_000,
            ),
            *(
                content * 3,
                b"\xef\xbb\xbf" + content,
                b"1" * 100_000,
                content.replace(b'"', b"'"),
                b"NaN",
                b"\0" * 4096,
            ),
        ]
    )


def mutate(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """A JSON value with one place changed."""
    if isinstance(value, dict) and value and (depth == 0 or rng.random() < 0.7):
        key = rng.choice(list(value))
        action = rng.random()
        if action < 0.15:
            return {name: item for name, item in value.items() if name != key}
        if action < 0.25:
            return {
                **value,
                rng.choice([ESCAPES[1], "", "auto_map", "quantization_config", "x" * 9999]): rng.choice(ODD),
            }
        return {**value, key: mutate(value[key], rng, depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return [*value[:at], mutate(value[at], rng, depth + 1), *value[at + 1 :]]
    return rng.choice(ODD)


def json_damage(content: bytes, rng: random.Random) -> bytes:
    """A well-formed file that means something else; headers of safetensors too."""
    head, body = b"", content
    if content[8:9] == b"{":  # safetensors: eight bytes of length, the header, the tensors
        size = int.from_bytes(content[:8], "little")
        head, body, tail = content[:8], content[8 : 8 + size], content[8 + size :]
    try:
        value = json.loads(body)
    except ValueError:
        return flip(content, rng)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = mutate(value, rng)
    if isinstance(value, dict) and not head and rng.random() < 0.15:
        value |= AUTO_MAP
    encoded = json.dumps(value).encode()
    return len(encoded).to_bytes(8, "little") + encoded + tail if head else encoded


def replaced(path: Path, rng: random.Random) -> str:
    """Puts something that isn't a plain file in its place."""
    kind = rng.choice(("fifo", "folder", "zero", "outside", "loop", "none", "unreadable"))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "unreadable":
        path.write_bytes(os.urandom(64))
    elif kind != "none":
        path.symlink_to({"zero": "/dev/zero", "outside": "/etc/hostname", "loop": path.name}[kind])
    return kind


DAMAGES: list[tuple[Callable[[bytes, random.Random], bytes], int]] = [
    (flip, 5),
    (cut, 3),
    (strange, 2),
    (json_damage, 8),
]


def damage(path: Path, rng: random.Random) -> str:
    """Damages one file; returns how."""
    if rng.random() < 0.08:
        return replaced(path, rng)
    chosen = rng.choices([kind for kind, _ in DAMAGES], [weight for _, weight in DAMAGES])[0]
    content = path.read_bytes()
    path.unlink()  # the original stays where the copy is a hard link
    path.write_bytes(chosen(content, rng))
    return chosen.__name__


@dataclass(frozen=True)
class Outcome:
    """What became of one case."""

    number: int
    what: str
    command: str
    code: int
    seconds: float
    peak_bytes: int
    output: str
    ran: bool

    @property
    def flaw(self) -> str:
        """Why it failed; empty where it is fine."""
        if self.ran:
            return "code ran"
        if self.code == TRACEBACK or "Traceback (most recent call last)" in self.output:
            return "traceback"
        if any(escape in self.output for escape in ESCAPES):
            return "escape sequence"
        if self.seconds > MOST_SECONDS:
            return f"{self.seconds:.0f} s"
        if self.peak_bytes > MOST_BYTES:
            return f"{self.peak_bytes / GIB:.1f} GB"
        return "" if self.code in (0, 1, 2) else f"exit code {self.code}"


def run_case(number: int, originals: Path, place: Path, seed: int) -> Outcome:
    """Damages a copy and runs one command on it."""
    rng = random.Random(f"{seed}-{number}")
    target = rng.choice(TARGETS)
    folder = place / f"case-{number}"
    shutil.copytree(originals, folder, copy_function=os.link)
    how = damage(folder / target.file, rng)
    weights = [
        0.15 if command.startswith(("train", "export {} {out}")) and "bytes" not in command else 1
        for command in target.commands
    ]
    command = rng.choices(target.commands, weights)[0]
    top = folder / target.file.split("/")[0]
    words = [word.replace("{}", str(top)).replace("{out}", str(folder / "out")) for word in command.split()]
    mark, log = folder / "mark", folder / "log"
    pid = os.fork()
    if pid == 0:
        _child(words, folder, mark, log)
    code, peak, seconds = _wait(pid)
    output = log.read_text(errors="surrogateescape")
    outcome = Outcome(number, f"{target.file}: {how}", command, code, seconds, peak, output, mark.exists())
    shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _child(words: Sequence[str], folder: Path, mark: Path, log: Path) -> None:
    """Becomes the command; never returns."""
    os.setsid()
    os.chdir(folder)
    os.environ["FUZZ_MARK"] = str(mark)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    (folder / "stdin").write_text("y\n" * 20)
    for number, source in ((0, os.open(folder / "stdin", os.O_RDONLY)), (1, descriptor), (2, descriptor)):
        os.dup2(source, number)
    code = TRACEBACK
    try:
        code = _command(list(words), folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _command(words: list[str], folder: Path) -> int:
    if words[0] == "train":
        import runpy

        sys.argv = ["sft.py", "--model_name_or_path", words[1], "--dataset_name", str(folder / "rows.jsonl")]
        sys.argv += ["--output_dir", str(folder / "trained"), "--max_steps", "1", "--use_cpu", "true"]
        sys.argv += ["--max_length", "32", "--report_to", "none"]
        runpy.run_path(str(ROOT / "train" / "sft.py"), run_name="__main__")
        return 0
    from accel_fsdp import cli

    sys.argv = ["accel-fsdp", *words]
    cli.main()
    return 0


def _wait(pid: int) -> tuple[int, int, float]:
    """Exit code, peak memory and seconds of a core of a child; those of the wall where it hangs and is ended."""
    until = time.monotonic() + HANGS_SECONDS
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, HANGS_SECONDS
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def warm_up() -> None:
    """Imports what the commands import, once, before the forks."""
    import accelerate
    import datasets
    import peft
    import torch
    import transformers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

    from accel_fsdp import cli, exporter, linter, models, planner
    from accel_fsdp.training import arguments, trainer

    torch.set_num_threads(1)
    del accelerate, datasets, peft, transformers, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
    _ = (arguments, cli, exporter.run, models.read_model, linter.lint, planner.show_plan, trainer)  # names load on use


def main() -> int:
    """Prints each failed case and a summary; returns 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone and show what it printed")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    warm_up()
    numbers = [options.case] if options.case is not None else range(options.first, options.first + options.count)
    flaws: Counter[str] = Counter()
    codes: Counter[int] = Counter()
    slowest, largest = 0.0, 0
    with tempfile.TemporaryDirectory() as place:
        pid = os.fork()  # so that what building needs isn't in the memory of each case
        if pid == 0:
            _built(Path(place) / "originals")
        assert os.waitpid(pid, 0)[1] == 0
        for number in numbers:
            outcome = run_case(number, Path(place) / "originals", Path(place), options.seed)
            codes[outcome.code] += 1
            slowest, largest = max(slowest, outcome.seconds), max(largest, outcome.peak_bytes)
            if outcome.flaw:
                flaws[outcome.flaw] += 1
                last = (outcome.output.strip().splitlines() or [""])[-1][:160]
                print(f"case {number}: {outcome.flaw}: {outcome.what}: {outcome.command}: {last!r}", flush=True)
            if options.case is not None:
                print(f"{outcome.what}: {outcome.command}: {outcome.code}\n{outcome.output}")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(numbers)} cases: {sum(flaws.values())} failed {dict(flaws)}; exit codes {dict(sorted(codes.items()))}")
    print(f"slowest {slowest:.1f} s, most memory {largest / GIB:.2f} GB, of which the imports' {own:.2f} GB")
    return 1 if flaws else 0


def _built(folder: Path) -> None:
    try:
        build(folder)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
