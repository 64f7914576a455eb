"""The command line: fast help, exit codes, and one clear message for each kind of bad input."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SFT, accel_fsdp, accelerate_launch, free_port, here, made_yaml, run
from safetensors.torch import load_file, save_file

from accel_fsdp import __version__, atomic_files, cli, units
from accel_fsdp.errors import UsageError, UserError

CATALOGUED = ("--model", "meta-llama/Llama-3.1-8B", "--gpus", "8xH100")  # nothing is built, and torch not imported
HEAVY = ("torch", "transformers", "accelerate", "datasets", "peft")


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; sys.argv = ['accel-fsdp', '--help']\n"
        "import atexit; from accel_fsdp.cli import main\n"
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if m in sys.modules]))\n"
        "main()"
    )
    finished = run([sys.executable, "-c", code])
    assert finished.code == 0
    assert "config" in finished.output
    assert "HEAVY []" in finished.output


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--model", "/no/such/model"], 1, "model /no/such/model does not exist"),
        (["--model", "{model}x"], 1, "Did you mean tiny-llama?"),
        (["--model", "{folder}"], 1, "has no config.json"),
        ([], 2, "--model is missing"),
        ([*CATALOGUED, "--layer-class", "LlamaDecoderLyer"], 1, "Did you mean LlamaDecoderLayer?"),
        ([*CATALOGUED, "--strategy", "FULL_SHRAD"], 2, "Did you mean FULL_SHARD?"),
        ([*CATALOGUED, "--wrap-policy", "SIZE_BASED_WRAP"], 2, "lists of layers, which have no forward"),
        ([*CATALOGUED, "--wrap-policy", "NO_WRAP", "--activation-checkpointing", "true"], 2, "names nothing"),
        ([*CATALOGUED, "--strategy", "3", "--cpu-offload", "true"], 2, "has no effect"),
        ([*CATALOGUED, "--num-machines", "2", "--num-processes", "9"], 1, "--num-processes 8"),
        ([*CATALOGUED, "--num-processes", "two"], 1, "not a whole number"),
        ([*CATALOGUED, "--num-processes", "\u00b2"], 1, "not a whole number"),
        ([*CATALOGUED, "--strategy", "4", "--num-processes", "1"], 1, "nothing would be sharded"),
        ([*CATALOGUED, "--cpu-offload", "yes"], 2, "one of: false, true"),
        (["--modle", "x"], 2, "--model"),
    ],
)
def test_refused_answers(flags: list[str], code: int, message: str, tiny_model: Path, tmp_path: Path) -> None:
    filled = [flag.format(model=tiny_model, folder=tmp_path) for flag in flags]
    finished = accel_fsdp("config", "--yes", *filled, "-o", tmp_path / "new.yaml")
    assert finished.code == code
    assert message in finished.output
    assert "Traceback" not in finished.output
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_the_missing_flags_are_named() -> None:
    finished = accel_fsdp("config", *CATALOGUED, "--method", "lora")
    assert finished.code == 2
    assert "unanswered: --num-machines --seq-len --engine --mixed-precision" in finished.output


def test_unwritable_output_is_refused() -> None:
    finished = accel_fsdp("config", "--yes", *CATALOGUED, "-o", "/proc/none/new.yaml")
    assert finished.code == 1
    assert "cannot write /proc/none/new.yaml" in finished.output


def test_flags_alone_are_enough_without_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    """What does not apply need not be given."""
    flags = ["--method", "full", "--gpus", "cpu", "--engine", "fsdp", "--fsdp-version", "2", "--strategy", "3"]
    words = [
        *flags,
        "--mixed-precision",
        "no",
        "--num-machines",
        "1",
        "--num-processes",
        "2",
        "-o",
        tmp_path / "new.yaml",
    ]
    finished = accel_fsdp("config", "--model", tiny_model, *words)
    assert finished.code == 0, finished.output


@pytest.mark.parametrize("wrong", ["mixed_precision: bf17", "main_process_port: abc", "fsdp_version: 3"])
def test_launch_lints_first(wrong: str, fsdp: Path, tmp_path: Path) -> None:
    key = wrong.partition(":")[0]
    (tmp_path / "fsdp.yaml").write_text(re.sub(rf"{key}: .*\n|\Z", f"{wrong}\n", fsdp.read_text(), count=1))
    finished = here("launch", "--dry-run", tmp_path / "fsdp.yaml", SFT)
    assert (finished.code, ": error AF" in finished.output) == (1, True), finished.output


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    lock = atomic_files.only_run(tmp_path)
    with pytest.raises(UserError, match="another run is writing"):
        atomic_files.only_run(tmp_path)
    lock.release()
    atomic_files.only_run(tmp_path).release()


def test_dry_run_prints_what_would_run(fsdp: Path, tiny_model: Path) -> None:
    finished = here("launch", "--dry-run", fsdp, SFT, "--max_steps", "1")
    assert finished.code == 0
    header = f"--model_name_or_path {tiny_model} --dataset_name train/data/fsdp_chat --output_dir runs/first"
    assert f"accelerate launch --config_file {fsdp} {SFT} {header} --max_steps 1" in finished.output
    assert f"arguments: those given, and the others from the header of {fsdp}" in finished.output
    assert finished.output.index("accelerate launch") < finished.output.index("FSDP_VERSION=2\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--learning_rat", "1"], 1, "--learning_rat is unknown. Did you mean --learning_rate?"),  # the linter's error
        (["--loging_steps", "1"], 2, "unknown argument --loging_steps. Did you mean --logging_steps?"),
        (["--max_steps", "many"], 2, "argument --max_steps"),
    ],
)
def test_a_dry_run_parses_the_arguments_of_our_script(words: list[str], code: int, message: str, fsdp: Path) -> None:
    finished = here("launch", "--dry-run", fsdp, SFT, *words)
    assert (finished.code, message in finished.output) == (code, True), finished.output


BAD_RUNS: dict[str, tuple[dict[str, str], str]] = {
    "no-model": ({"--model_name_or_path": "/no/such/model"}, "model /no/such/model does not exist"),
    "empty-data": ({"--dataset_name": "{folder}/empty.jsonl"}, "it has no rows"),
    "no-rows": ({"--dataset_name": "{folder}/no_rows.csv"}, "corresponds to no data"),
    "columns": ({"--dataset_name": "{folder}/columns.jsonl"}, "only: question, answer"),
    "bad-row": ({"--dataset_name": "{folder}/turns.jsonl"}, "turns.jsonl, row 2: messages is not"),
    "broken-json": ({"--dataset_name": "{folder}/cut.jsonl"}, "JSON parse error"),
    "unwritable": ({"--output_dir": "/proc/none"}, "cannot write /proc/none"),
    "unknown-flag": ({"--datset_name": "x"}, "Did you mean --dataset_name?"),
    "bad-value": ({"--max_steps": "many"}, "argument --max_steps"),
    "too-short": ({"--max_length": "1"}, "--max_length 1 is too short"),
    "eval-on-start": ({"--eval_on_start": "true"}, "--eval_on_start without evaluation"),
    "no-flash": ({"--attn_implementation": "flash_attention_2"}, "cannot load the weights"),
    "missing-weight": ({"--model_name_or_path": "{folder}/gaps"}, "lacks 1 weight of its model"),
    "cut-weights": ({"--model_name_or_path": "{folder}/cut"}, "cannot load the weights"),
    "nothing-to-resume": ({"--resume_from_checkpoint": "true"}, "no complete checkpoint-N folder"),
}


@pytest.fixture(scope="module")
def bad_data(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    good = {"messages": [{"role": "user", "content": "Hi"}]}
    for name in ("gaps", "cut"):
        shutil.copytree(tiny_model, folder / name)
    weights = load_file(tiny_model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "gaps" / "model.safetensors", metadata={"format": "pt"})
    whole = (tiny_model / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jsonl").touch()
    (folder / "no_rows.csv").write_text("text\n")
    (folder / "columns.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    (folder / "turns.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good).replace('"Hi"', "null") + "\n")
    (folder / "cut.jsonl").write_text(json.dumps(good) + '\n{"mess')
    return folder


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    config = tmp_path_factory.mktemp("yaml") / "fsdp.yaml"
    config.write_text(made_yaml(model=str(tiny_model), mixed_precision="no"))
    return config


@pytest.fixture(scope="module")
def bad_words(bad_data: Path, tiny_model: Path, text_data: Path) -> dict[str, list[str]]:
    """The arguments of each of the bad runs."""
    right = {"--model_name_or_path": str(tiny_model), "--dataset_name": str(text_data)}
    words_of = {}
    for name, (changed, _) in BAD_RUNS.items():
        flags = {**right, "--output_dir": str(bad_data / "runs" / name)}
        flags |= {flag: value.format(folder=bad_data) for flag, value in changed.items()}
        words_of[name] = [word for pair in flags.items() for word in pair]
    return words_of


@pytest.fixture(scope="module")
def bad_ends(fsdp: Path, bad_words: dict[str, list[str]]) -> dict[str, str]:
    """What each of the bad runs prints, with its exit code in the last line."""
    launcher_words = ["--num_processes", "1"]
    finished = accelerate_launch(
        fsdp, ROOT / "tests" / "several.py", launcher=launcher_words, SEVERAL=json.dumps(bad_words)
    )
    assert finished.code == 0, finished.output
    parts = re.split(r"^job (.*)\n", finished.output, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_runs_end_with_one_message(name: str, bad_data: Path, bad_ends: dict[str, str]) -> None:
    assert_one_message(bad_ends[name], BAD_RUNS[name][1])
    assert re.search(r"^code [12]$", bad_ends[name], re.M)
    assert not (bad_data / "runs" / name).exists()


def test_the_launcher_adds_nothing_to_it(fsdp: Path, bad_words: dict[str, list[str]]) -> None:
    finished = accel_fsdp("launch", fsdp, SFT, *bad_words["cut-weights"])
    assert finished.code in (1, 2)
    assert_one_message(finished.output, BAD_RUNS["cut-weights"][1])


def test_a_rank_left_alone_lets_the_other_speak(fsdp: Path, bad_words: dict[str, list[str]]) -> None:
    """Rank 0 alone reads the weights and leaves; the other one waits for it when the launcher has yet to look."""
    seldom = ["--monitor_interval", "1.5"]
    finished = accelerate_launch(fsdp, SFT, *bad_words["cut-weights"], launcher=seldom)
    assert finished.code == 1
    assert BAD_RUNS["cut-weights"][1] in finished.output
    assert "gloo/" not in finished.output


def test_a_layer_class_that_the_model_lacks(fsdp: Path, bad_words: dict[str, list[str]], tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(fsdp.read_text().replace("LlamaDecoderLayer", "LlamaDecoderLyer"))
    words = bad_words["nothing-to-resume"][:-2]
    finished = accel_fsdp("launch", config, SFT, *words)
    assert finished.code in (1, 2)
    assert_one_message(finished.output, "Did you mean LlamaDecoderLayer?")


def assert_one_message(output: str, message: str) -> None:
    assert message in output
    assert ("\n" + output).count("\nerror: ") == 1
    assert "Traceback" not in output


def test_an_unwritten_run_is_not_mixed_with_another(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "final").mkdir(parents=True)
    config = tmp_path / "fsdp.yaml"
    config.write_text(made_yaml(model=str(tiny_model), mixed_precision="no"))
    words = ["--model_name_or_path", tiny_model, "--dataset_name", text_data, "--output_dir", tmp_path / "run"]
    finished = accel_fsdp("launch", config, SFT, *words)
    assert finished.code == 1
    assert "already holds a run" in finished.output


def test_python_without_a_launcher_is_refused(tiny_model: Path) -> None:
    finished = run([sys.executable, SFT, "--model_name_or_path", tiny_model, "--dataset_name", "x"])
    assert finished.code == 1
    assert "not started by accelerate launch" in finished.output
    assert "Traceback" not in finished.output


PLAIN_SCRIPT = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(64, 64)
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
held = sum(p.numel() for p in model.parameters())
print(f"HELD {held} {type(model).__name__} {accelerator.distributed_type}", flush=True)
torch.distributed.barrier() if torch.distributed.is_initialized() else None
"""


def test_accelerate_alone_would_train_unsharded(fsdp: Path, tmp_path: Path) -> None:
    """The reason for cpu.py: if this fails, Accelerate has learned FSDP on CPU and the patches can go."""
    (script := tmp_path / "plain.py").write_text(PLAIN_SCRIPT)
    finished = accelerate_launch(fsdp, script)
    assert finished.code == 0, finished.output
    assert finished.output.count(f"HELD {64 * 64 + 64} ") == 2
    assert "FSDP" not in finished.output


def test_flags_of_launch_stand_before_the_file(tmp_path: Path) -> None:
    (script := tmp_path / "job.py").write_text("print('started')\n")
    refused = here("launch", ROOT / "accelerate_configs/ddp.yaml", script, "--dry-run")
    assert refused.code == 2
    assert "launch --dry-run FILE SCRIPT" in refused.output
    assert "started" not in refused.output


def test_version_and_a_closed_pipe() -> None:
    assert accel_fsdp("--version").output.strip() == __version__
    piped = run(["bash", "-c", f"{sys.executable} -m accel_fsdp check --list-rules | head -1"])
    assert len(piped.output.splitlines()) == 1, piped.output


# Words that are no flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--dryrun", "FILE", "SCRIPT", "--steps", "3"],
         "--dryrun is not a flag of accel-fsdp launch. Did you mean --dry-run?"),
        (["launch", "--machine_rnk", "1", "FILE", "SCRIPT"], "--machine-rnk is not a flag of accel-fsdp launch. Did"),
        (["check", "--strct", "FILE"], "--strct is not a flag of accel-fsdp check. Did you mean --strict?"),
        (["check", "-s", "FILE"], "-s is not a flag of accel-fsdp check."),
        (["migrate", "--dryrun", "FILE", "--to", "fsdp2"], "Did you mean --dry-run?"),
        (["export", "--chek", "FOLDER"], "Did you mean --check?"),
        (["init", "--nativ", "FOLDER"], "Did you mean --native?"),
        (["config", "--frm=FILE", "--yes"], "--frm is not a flag of accel-fsdp config. Did you mean --from?"),
        (["plan", "--mode", "M", "--gpu", "8xH100"], "Did you mean --model? --gpu is not a flag of accel-fsdp plan."),
        (["plan", "--seq-len", "abc"], "--seq-len: abc is not a whole number"),
        (["plan", "--seq_len=None"], "--seq-len: None is not a whole number"),
        (["plan", "--accumulation", "1.5"], "--accumulation: 1.5 is not a whole number"),
        (["launch", "--machine_rank", "x", "FILE", "SCRIPT"], "--machine-rank: x is not a whole number"),
        (["init", "a", "b"], "accel-fsdp init does not take the word b"),
        (["init"], "required: DIR"),
        (["plan", "--precision", "bf17"], "--precision: bf17 is not one of bf16, fp16, no. Did you mean bf16?"),
        (["check", "FILE", "--fix=false"], "--fix: ignored explicit argument 'false'"),
        (["migrate", "FILE", "--to", "fsdp3"], "--to: fsdp3 is not one of fsdp1, fsdp2, zero1, zero2, zero3. Did"),
        (["chekc", "x.yaml"], "unknown command: chekc. Did you mean check?"),
        (["--chek"], "unknown command: --chek. Did you mean check?"),
    ],
)  # fmt: skip
def test_a_word_that_no_flag_takes_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        cli.call(words)


def test_the_default_config_file_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every bare `accelerate launch` of this machine reads it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert cli.call(["config", "--yes", *CATALOGUED, "-o", str(tmp_path / "mine.yaml")]) == 0
    assert f"written: {tmp_path / 'mine.yaml'}\n" in capsys.readouterr().err
    assert cli.call(["config", "--yes", *CATALOGUED]) == 0
    place = tmp_path / "accelerate" / "default_config.yaml"
    message = f"written: {place}, which accelerate launch reads where no --config_file is given\n"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--machine_rank", "1"], ["--machine-rank", "1"], ["--machine_rank=1"]])
def test_words_that_are_taken_as_they_are(words: list[str]) -> None:
    """Flags of launch in either spelling, and those of a script, which are no flags of ours."""
    own = ["launch", *words, "--dry_run", "job.yaml", "train.py", "--dryrun", "--steps", "None"]
    _, flags, script_args = cli._parse(own)
    assert (flags.machine_rank, flags.dry_run, script_args) == (1, True, ("--dryrun", "--steps", "None"))


def test_values_that_begin_like_flags() -> None:
    assert cli._parse(["config", "-yo", "new.yaml"])[1].output == Path("new.yaml")
    assert cli._parse(["check", "--args=--strct", "-"])[1].files == (Path("-"),)
    assert cli._parse(["launch", "--machine-rank", "-1", "job.yaml", "train.py"])[1].machine_rank == -1


INTERRUPTED = """\
import signal, sys, time
from accel_fsdp.errors import guard

def main():
    exec("raise KeyboardInterrupt")  # as where Ctrl-C comes while a dataclass is made

code = guard(main)
if sys.argv[1:]:
    signal.raise_signal(signal.SIGINT)
sys.exit(code)
"""


@pytest.mark.parametrize(("again", "code"), [([], 130), (["again"], -signal.SIGINT)])
def test_ctrl_c_has_its_exit_code_wherever_it_comes(again: list[str], code: int, tmp_path: Path) -> None:
    """A second one ends the exit at once."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    finished = run([sys.executable, "-m", "interrupted", *again], PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (finished.code, finished.output.strip()) == (code, "interrupted")


STARTING = """\
import sys, threading
from accel_fsdp import cli

def call(words):
    threading.Thread(target=threading.Event().wait).start()
    raise KeyboardInterrupt  # as where it comes before an executor knows its new thread

cli.call, sys.argv[1:] = call, ["export"]
cli.main()
"""


def test_ctrl_c_waits_for_no_thread() -> None:
    finished = run([sys.executable, "-c", STARTING])
    assert (finished.code, finished.output.strip().partition(",")[0]) == (130, "interrupted")


def test_one_thing_is_not_several() -> None:
    shown = {units.counted(number, "process", "processes") for number in (0, 1, 2)}
    assert shown == {"0 processes", "1 process", "2 processes"}
    yaml = ROOT / "accelerate_configs" / "fsdp2.yaml"
    with pytest.raises(UsageError, match="--gpus 1xH100 is 1 GPU, the YAML has 8 processes"):
        cli.call(["plan", "--gpus", "1xH100", "--config", str(yaml)])


def test_a_hub_that_cannot_be_reached_takes_one_line() -> None:
    """huggingface_hub alone prints eleven, of five retries."""
    impatient = "import time; time.sleep = lambda seconds: None; from accel_fsdp.cli import main; main()"
    words = ["check", str(ROOT / "accelerate_configs" / "fsdp2.yaml"), "--model", "nobody/nothing"]
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HUB_OFFLINE": "0", "WARM": "0"}
    finished = run([sys.executable, "-c", impatient, *words], **hub)
    assert finished.code == 2, finished.output
    warnings_shown = [line for line in finished.output.splitlines() if re.search("thrown while|Retrying in", line)]
    assert len(warnings_shown) == 1, finished.output
    assert warnings_shown[0].endswith("/nobody/nothing/resolve/main/config.json; trying again")
