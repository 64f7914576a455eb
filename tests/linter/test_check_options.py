"""The command `accel-fsdp check`, and `launch`, which checks first: exit codes, messages, rules to leave out, stdin."""

import json
import sys
from pathlib import Path

import pytest
from checking import V1, V2
from conftest import SFT, here, run

from accel_fsdp import linter
from accel_fsdp.linter.rules import RULES

DRY = "launch --dry-run"
RETIRED = "  fsdp_backward_prefetch_policy: BACKWARD_PRE"
FILES = {
    "good.yaml": V2,
    "warned.yaml": V2 + "  fsdp_use_orig_params: false\n",
    "typo.yaml": V2 + "  fsdp_ofload_params: true\n",
    "retired.yaml": f"{V1}{RETIRED}\n",
    "args.sh": "accelerate launch train.py \\\n  --optim adafactor\n",
    "train.py": "import trl\n\ntrainer.train()\ntrainer.save_model()\n",
    "broken.py": "def (",
    "two.yaml": f"num_machines: 2\n{V2}",
    "engine.yaml": f"# Launch:\n#   accel-fsdp launch THIS_FILE train/sft.py --max_steps 3\nnum_machines: 2\n{V2}",
    "launched.sh": "accelerate launch --config_file two.yaml train.py --bf16\n",
    "addressed.sh": "accelerate launch --main-process-ip 10.0.0.1 --config_file two.yaml train.py --bf16\n",
    "config.json": V2,
    "configs/good.yaml": V2,
    "configs/compose.yaml": "services: {web: {image: nginx}}\n",
    "configs/deep/bad.yml": f"{V1}{RETIRED}\n",
    "clean/good.yaml": V2,
    "clean/compose.yaml": "services: {web: {image: nginx}}\n",
    "empty/compose.yaml": "services: {web: {image: nginx}}\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("check good.yaml", 0, "good.yaml: clean"),
        ("check good.yaml warned.yaml", 0, "warning AF305"),
        ("check good.yaml warned.yaml --strict", 1, "warning AF305"),
        ("check good.yaml --args args.sh", 1, "AF604"),
        ("check", 2, "fix: accel-fsdp check FILE.yaml"),
        ("check two.yaml --strict", 1, "takes it and the machine's number from SLURM, Kubernetes and SkyPilot"),
        ("check two.yaml --strict", 1, "or --main-process-ip ADDRESS before the script"),
        ("check two.yaml --args launched.sh", 1, "error AF403"),
        ("check two.yaml --args addressed.sh", 0, "clean"),
        ("check engine.yaml --strict", 0, "clean"),
        ("check good.yaml --args none", 2, "fix: --args FILE, which holds"),
        ("check none.yaml", 2, "error: cannot read none.yaml"),
        ("check none.yaml typo.yaml", 2, "error: cannot read none.yaml"),
        ("check none.yaml typo.yaml", 2, "typo.yaml:8: error AF103"),
        ("check good.yaml --model nope/none", 2, "error: cannot read the config of nope/none"),
        ("check good.yaml --script train.py", 0, "warning AF901: train.py:4: save_model writes nothing"),
        ("check good.yaml --script broken.py", 2, "broken.py"),
        ("check good.yaml --script none.py", 2, "none.py"),
        ("check config.json", 2, "not JSON"),  # Accelerate chooses the parser by the name
        ("check --fix -", 2, "fix: accel-fsdp check --fix FILE"),
        ("check --explain af302", 0, "launcher always exports"),
        ("check --explain AF999", 2, "fix: accel-fsdp check --list-rules"),
        ("check retired.yaml", 1, "error AF104"),
        ("check retired.yaml --strict --ignore af104", 0, "clean"),
        ("check retired.yaml --strict --ignore AF104,AF301", 0, "clean"),
        ("check retired.yaml --ignore AF999", 2, "there is no rule AF999"),
        ("check configs", 1, "bad.yml:8: error AF104"),
        ("check clean --strict", 0, "clean/good.yaml: clean"),
        ("check empty", 2, "no Accelerate YAML in empty"),
        ("check --json --format text good.yaml", 2, "--json and --format text"),
        ("check --format sarf good.yaml", 2, "Did you mean sarif"),
        ("check --stdin-filename b.yaml a.yaml", 2, "--stdin-filename b.yaml with files"),
        ("check --stdin-filename b.yaml a.yaml -", 2, "--stdin-filename b.yaml with files"),
        ("launch good.yaml train.py --no-check", 2, "--no-check after SCRIPT"),
        (f"{DRY} good.yaml train.py --optim adafactor", 1, "AF604"),
        (f"{DRY} good.yaml train.py --optim adafactor", 1, "--no-check launches it as it is"),
        (f"{DRY} --no-check good.yaml train.py --optim adafactor", 0, "AF604"),
        (f"{DRY} --no-check good.yaml train.py --optim adafactor", 0, "good.yaml train.py --optim adafactor"),
        (f"{DRY} good.yaml train.py --label_smoothing_factor 0.1", 1, "AF630"),
        (f"{DRY} good.yaml {SFT} --label_smoothing_factor 0.1", 0, "label_smoothing"),  # which train/sft.py mends
        (f"{DRY} good.yaml train.py", 0, "warning AF901: train.py:4"),
        (f"{DRY} good.yaml train.py", 0, "accelerate launch --config_file good.yaml train.py"),
    ],
)
def test_what_a_command_ends_with(words: str, code: int, says: str) -> None:
    finished = here(*words.split())
    assert (finished.code, says in finished.text) == (code, True), finished.output
    for never in ("Traceback", "compose.yaml", "--layer-class"):
        assert never not in finished.output
    if words.startswith(DRY):  # what is printed is to be copied
        assert " AF" not in finished.printed
        assert ("accelerate launch" in finished.printed) == ("not launched" not in finished.text) == (not code)


def test_all_rules_are_listed() -> None:
    assert [line.split()[0] for line in here("check", "--list-rules").printed.splitlines()] == sorted(RULES)


def test_json_lists_unreadable_files_too() -> None:
    read, unread = json.loads(here("check", "none.yaml", "typo.yaml", "--json").printed)
    assert (read["file"], read["code"]) == ("typo.yaml", "AF103")
    assert (unread["file"], unread["code"]) == ("none.yaml", "unreadable")
    assert read.keys() == unread.keys()
    listed = here("check", "typo.yaml", "--args", "none", "--json")
    assert (listed.code, [entry["code"] for entry in json.loads(listed.printed)]) == (2, ["unreadable"])


@pytest.mark.parametrize(
    "line",
    [
        f"{RETIRED}  # accel-fsdp: ignore AF104",
        f"  # accel-fsdp: ignore AF103, AF104 (the cluster's own)\n{RETIRED}",
        f"{RETIRED}  #accel-fsdp:  ignore af104",
    ],
)
def test_a_rule_is_left_out_at_a_line(line: str, folder: Path) -> None:
    (file := folder / "fsdp.yaml").write_text(f"{V1}{line}\n")
    assert linter.lint(file, linter.LintOptions()) == linter.lint(file, linter.LintOptions(fix=True)) == []
    assert file.read_text() == f"{V1}{line}\n"
    file.write_text(f"{V1}{line.replace('AF104', 'AF105').replace('af104', 'af105')}\n")
    assert [finding.code for finding in linter.lint(file, linter.LintOptions())] == ["AF104"]


def test_checking_imports_no_heavy_library() -> None:
    code = (
        "import sys; from pathlib import Path; from accel_fsdp import linter\n"
        "linter.lint_all(linter.CheckCommand(files=(Path('good.yaml'),)))\n"
        "print([m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])"
    )
    assert run([sys.executable, "-c", code]).output.endswith("[]\n")


@pytest.mark.parametrize(
    "text",
    [
        "from accel_fsdp.training import SftTrainer\ntrainer.save_model()\n",
        "#!/bin/sh\nexec python train.py # trainer.save_model()\n",
        "trainer.save_model()\0\n",
    ],
)
def test_launch_warns_of_no_other_script(text: str, folder: Path) -> None:
    """One that mends it, or isn't Python."""
    (folder / "own.py").write_text(text)
    launched = here("launch", "--dry-run", "good.yaml", "own.py")
    assert (launched.code, "AF901" in launched.output) == (0, False)
    assert "accelerate launch --config_file good.yaml own.py\n" in launched.printed
