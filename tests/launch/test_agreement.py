"""What machines of one job compare, and how what differs is said."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from accel_fsdp.errors import UserError
from accel_fsdp.launch import agreement
from accel_fsdp.launch.agreement import Member, Settings

FLAGS: Mapping[str, tuple[str, dict[str, str]]] = {
    "values": ("--lr 1e-3 --name=a --flag", {"--lr": "1e-3", "--name": "a", "--flag": "given"}),
    "several values": ("train --columns a b --x -1", {"arguments": "train", "--columns": "a b", "--x": "-1"}),
    "paths": ("--model /mnt/a/llama --data ./rows.jsonl", {"--model": "llama", "--data": "rows.jsonl"}),
    "one flag twice": ("--lr 1 --lr=2 --layer a b", {"--lr": "1 --lr 2", "--layer": "a b"}),
    "addresses of pages": ("--data https://example.org/a", {"--data": "https://example.org/a"}),
    "each machine's own": ("--output_dir a --cache-dir b --local_rank 1 --gpu 0 --master_port 1 --log_dir c", {}),
    "as short as these": ("--logging_steps 1 --use_cache true", {"--logging_steps": "1", "--use_cache": "true"}),
}


@pytest.mark.parametrize("kind", FLAGS)
def test_arguments_that_are_compared(kind: str) -> None:
    words, compared = FLAGS[kind]
    assert agreement.flags_of(words.split()) == compared


def test_one_folder_is_one_value_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative on one machine and absolute on another; a folder that isn't there is a name, as of a hub's model."""
    (tmp_path / "data" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "data")
    for name in ("train", "train/", "./train", "../data/train", f"{tmp_path}/data/train", f"{tmp_path}/data/train/"):
        assert agreement.flags_of(["--data", name]) == {"--data": "train"}
    for name in (".", "../data", f"{tmp_path}/data"):
        assert agreement.flags_of(["--data", name, f"path={name}"]) == {"--data": "data", "path": "data"}
    monkeypatch.chdir(tmp_path)
    assert agreement.flags_of(["--data", "data/train,data"]) == {"--data": "train,data"}
    assert agreement.flags_of(["--data", "data/test"]) == {"--data": "data/test"}


def test_a_host_called_by_a_plain_word_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for host in ("train", "work"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        found.append(agreement.flags_of(["--split", "train"]))
    assert found[0] == found[1] == {"--split": "train"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("--layer x --layer y", "--layer z --layer y"),
        ("--data /d/a.jsonl,/d/b.jsonl", "--data /d/c.jsonl,/d/b.jsonl"),
        ("--rank 8", "--rank 16"),
        ("--model meta/Llama", "--model other/Llama"),
        ("model.lr=1e-3", "model.lr=1e-2"),
        ("--temp 0.5", "--temp 0.9"),
        ("--scratch true", "--scratch false"),
    ],
)
def test_arguments_that_differ_are_told_apart(ours: str, theirs: str) -> None:
    assert agreement.flags_of(ours.split()) != agreement.flags_of(theirs.split())


def test_the_host_itself_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for host in ("n1", "n2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        found.append(agreement.flags_of(["--experiment", f"run-on-{host}", "--n10", "n10"]))
    assert found[0] == found[1]


def test_secrets_are_compared_and_not_shown() -> None:
    for words in (["--api_key", "hf_abc"], ["--trainer.logger.api_key=hf_abc"], ["wandb.api_key=hf_abc"]):
        (value,) = agreement.flags_of(words).values()
        assert "hf_abc" not in value
    assert value != agreement.flags_of(["--api_key", "hf_abd"])["--api_key"]
    shown = [
        str(agreement.of_job({name: value}, Path("script.py"))["environment"][name])
        for name in ("DS_API_KEY", "ACCELERATE_TOKEN", "FSDP_SECRET_X")
        for value in ("hf_abc", "hf_abd")
    ]
    assert not any("hf_ab" in text for text in shown)
    assert len(set(shown)) == 2


def test_variables_that_are_compared(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text("{}")
    variables = {
        "FSDP_VERSION": "2",
        "NVIDIA_TF32_OVERRIDE": "0",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
        "TORCHINDUCTOR_LOGIT_SOFTCAP": "1",
        "TRITON_CACHE_DIR": "/tmp/a",
        "CUBLAS_LOGINFO_DBG": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "RANK": "1",
        "HF_TOKEN": "hf_abc",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "zero.json"),
    }
    settings = agreement.of_job(variables, tmp_path / "train.py")
    compared = {"FSDP_VERSION", "NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "TORCHINDUCTOR_LOGIT_SOFTCAP"}
    assert settings["environment"].keys() == {*compared, "ACCELERATE_DEEPSPEED_CONFIG_FILE"}
    assert settings["script"] == {"train.py": "missing"}


def outcome(members: list[tuple[Member, Settings]]) -> str:
    """What the members of one comparison say; empty where they go on."""
    try:
        agreement.compare(members)
    except UserError as error:
        return str(error)
    return ""


def rank(number: int, machine: int, **settings: object) -> tuple[Member, Settings]:
    return Member(number, machine, f"n{machine}", may_differ=[]), {"arguments": settings}


def test_the_table_names_each_value_and_who_has_it() -> None:
    said = outcome([rank(0, 0, seed=1), rank(1, 1, seed=1), rank(2, 2, seed=2)])
    table = [line.split() for line in said.splitlines()[1:4]]
    assert table[1:] == [["arguments:", "seed", "1", "0", "(n0),", "1", "(n1)"], ["2", "2", "(n2)"]]
    assert "0 (n0) rank 1" in outcome([rank(0, 0, seed=1), rank(1, 0, seed=2)])


def test_a_group_that_a_member_has_not_is_not_compared() -> None:
    """Ranks that get their weights from another one, or have not read the rows themselves."""
    full = rank(0, 0, seed=1)
    assert outcome([(full[0], {**full[1], "weights": {"a": "1"}}), rank(1, 1, seed=1)]) == ""


def test_what_one_machine_allows_may_differ() -> None:
    (member, settings) = rank(1, 1, seed=2)
    allowing = Member(member.number, member.machine, member.host, may_differ=["seed"])
    assert outcome([rank(0, 0, seed=1), (allowing, settings)]) == ""


def test_many_differences_and_long_values_are_cut() -> None:
    table = outcome([rank(n, n, **{f"flag_{i}": f"{'x' * 200}{n}" for i in range(20)}) for n in range(2)])
    assert "arguments: 14 more" in table
    assert "x0 " in table
    assert "x1 " in table
    assert max(map(len, table.splitlines()[:10])) < 120


def test_each_setting_can_be_allowed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable's names are divided by commas and spaces."""
    settings = agreement.of_job({}, tmp_path / "train.py")["versions"]
    assert "accel-fsdp-code" in settings
    for name in settings:
        monkeypatch.setenv(agreement.MAY_DIFFER, f"seed, {name}")
        members = [(Member(number, number), {"versions": {name: str(number)}}) for number in range(2)]
        assert outcome(members) == "", name
