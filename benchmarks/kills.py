"""Kills training at random instants and resumes it: `python benchmarks/kills.py --chain N` for each, then `--write`.

A chain is one run of `train/sft.py` on two CPU processes under one engine and method; the last one is resumed on
another mesh each time, of two or four processes, sharded by Accelerate or, for tensor and expert parallelism, by
transformers. It is killed by SIGKILL again
and again, at a random instant after training began or inside a save, is resumed each time, and at last runs to its
end. Each resume must start from the newest complete checkpoint and lose no other step; the losses of the whole run must
be those of one that was never killed, and no half-written checkpoint may be left. The last chain saves in the
background and uploads to a store: it is killed as it copies, writes or uploads, and loses its disk with each kill in an
upload. `kills_case.py` draws the instants. Needs the test extra.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import results

from accel_fsdp.checkpoints import completeness
from accel_fsdp.wizard import interview, to_yaml

HERE = Path(__file__).parent
CASE, DATA = HERE / "kills_case.py", HERE / "data" / "kills.json"
CHATS = HERE.parent / "train" / "data" / "fsdp_chat" / "train.jsonl"
SEED = 20240817
STEPS, SAVE_STEPS, RANKS = 90, 3, 2
CHAINS: list[tuple[str, str, dict[str, int]]] = [
    *[("FSDP1", "full", {"save": 3, "within": 5}), ("FSDP2", "full", {"save": 3, "within": 5})],
    *[("FSDP1", "lora", {"save": 2, "within": 5}), ("FSDP2", "lora", {"save": 2, "within": 5})],
    ("changing meshes", "full", {"save": 4, "within": 6}),
    ("FSDP2", "in the background, to a store", {"staging": 10, "write": 10, "upload": 10}),
]
"""Engine, method, and how many kills of each kind."""
STORED = len(CHAINS) - 1
"""The chain whose checkpoints are written in the background and uploaded."""
STORED_STEPS = 150
"""Of that chain, which has more kills."""
MESHES = [
    ({}, 2, ["--per_device_train_batch_size", "2"]),
    ({"dp_shard": 2, "tp": 2}, 4, ["--per_device_train_batch_size", "2", "--expert_parallel_size", "4"]),
    ({"dp_shard": 1, "tp": 2}, 2, ["--per_device_train_batch_size", "4"]),
    ({}, 4, ["--per_device_train_batch_size", "1", "--expert_parallel_size", "2"]),
]
"""Sizes of the mesh, ranks, and arguments: four rows in each step."""
Life = tuple[Path, list[str]]
"""The YAML and the arguments of a launch."""
LIFE_SECONDS = 120


def main() -> None:
    """Runs one chain and keeps its outcome, or writes all outcomes into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chain", type=int, choices=range(len(CHAINS)))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.chain is not None:
        with tempfile.TemporaryDirectory() as folder:
            keep(options.chain, chain(options.chain, Path(folder)))
    if options.write:
        write(json.loads(DATA.read_text()))


def chain(number: int, work: Path) -> list[dict[str, Any]]:
    """One run and its deaths, a row each; the last row is its end."""
    engine, method, counts = CHAINS[number]
    kills = sum(counts.values())
    model, data = fixtures(work, mixture=not engine.startswith("FSDP"))
    lives = list(lives_of(work, engine, model))
    straight = live(work, lives[0], model, data, "straight", method)
    assert straight.returncode == 0, straight.stdout
    within = json.loads((work / "straight" / "run.json").read_text())["timings_seconds"]["training"] / kills
    dice = random.Random(SEED + number)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    dice.shuffle(kinds)
    rows = [
        death(work, (lives[place % len(lives)], model, data), method, (kind, within), dice.randrange(1 << 30))
        for place, kind in enumerate(kinds)
    ]
    last = live(work, lives[kills % len(lives)], model, data, "killed", method)
    assert last.returncode == 0, last.stdout
    check_left(work, steps_of(method))
    ends = [losses(work / name, steps_of(method)) for name in ("killed", "straight")]
    apart = max(abs(a - b) for a, b in zip(*ends, strict=True))
    print(f"chain {number}: {len(rows)} kills, losses apart by {apart:.1e}")
    return [*rows, {"kind": "end", "apart": apart}]


def steps_of(method: str) -> int:
    """The steps of a chain's run."""
    return STORED_STEPS if method == CHAINS[STORED][1] else STEPS


def check_left(work: Path, steps: int) -> None:
    """At the end nothing is left but complete checkpoints, as many as are kept."""
    places = [work / "killed", *([work / "store" / "killed"] if (work / "store").exists() else [])]
    for place in places:
        left = sorted(path.name for path in place.iterdir() if "checkpoint" in path.name)
        assert left == [f"checkpoint-{step}" for step in (steps - SAVE_STEPS, steps)], (place, left)
        assert not any(completeness.flaw(place / name) for name in left)


def newest_of(work: Path) -> int:
    """The step from which the run goes on: the newest complete one, here or in the store."""
    return max(step_of(completeness.choose(place / "killed").newest) for place in (work, work / "store"))


def lives_of(work: Path, engine: str, model: Path) -> Iterator[Life]:
    """The launches that a chain takes in turn."""
    meshes = [({}, RANKS, ["--per_device_train_batch_size", "2"])] if engine.startswith("FSDP") else MESHES
    for number, (sizes, ranks, words) in enumerate(meshes):
        version = engine.removeprefix("FSDP") if engine.startswith("FSDP") else "2"
        flags = {"model": str(model), "num_processes": str(ranks), "mixed_precision": "no", "fsdp_version": version}
        text = to_yaml.to_text(interview.answers(interview.interview(flags, {}, "defaults")))
        mesh = "".join(f"  parallelism_config_{axis}_size: {size}\n" for axis, size in sizes.items())
        yaml = work / f"{number}.yaml"
        yaml.write_text(text + (f"parallelism_config:\n{mesh}" if mesh else ""))
        yield yaml, words


def death(work: Path, job: tuple[Life, Path, Path], method: str, how: tuple[str, float], seed: int) -> dict[str, Any]:
    """Starts or resumes the run and kills it; what it was doing, and what is left of it."""
    kind, within = how
    run, note = work / "killed", work / "note.json"
    note.unlink(missing_ok=True)
    before = newest_of(work)
    number = within if kind == "within" else before + 2 * SAVE_STEPS
    environment = {"KILL_AT": f"{kind}:{number}", "KILL_SEED": str(seed), "KILL_NOTE": str(note)}
    finished = live(work, *job, "killed", method, **environment)
    assert note.exists(), finished.stdout
    if kind == "upload":
        shutil.rmtree(run)
    noted, newest = json.loads(note.read_text()), newest_of(work)
    lost = noted["step"] - newest
    row = {"kind": kind, "seed": seed, "expected": before, **noted, "newest": newest, "lost": lost}
    row["half_written"] = len(completeness.choose(run).skipped)
    print(row, flush=True)
    return row


def live(work: Path, life: Life, model: Path, data: Path, run: str, method: str, **environment: str) -> Any:
    """One launch, from the newest complete checkpoint where there is one."""
    yaml, more = life
    fixed = {
        "--model_name_or_path": model,
        "--dataset_name": data,
        "--output_dir": work / run,
        "--max_steps": steps_of(method),
        "--save_steps": SAVE_STEPS,
        "--save_total_limit": 2,
        "--learning_rate": 1e-3,
        "--logging_steps": 1,
        "--disable_tqdm": "true",
        "--resume_from_checkpoint": "auto",
    }
    words = [str(word) for pair in fixed.items() for word in pair]
    words += [*more, *(["--use_peft"] if method == "lora" else [])]
    if method == CHAINS[STORED][1]:
        words += ["--async_checkpoints", "--checkpoint_uri", f"file://{work}/store/{run}"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    return subprocess.run(
        [*launcher, "--config_file", str(yaml), str(CASE), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIFE_SECONDS,
        check=False,
    )


def step_of(checkpoint: Path | None) -> int:
    """The step in a checkpoint's name; 0 for none."""
    return int(checkpoint.name.removeprefix("checkpoint-")) if checkpoint else 0


def losses(run: Path, steps: int) -> list[float]:
    """All losses of a run that went through, in order."""
    state = json.loads((run / f"checkpoint-{steps}" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def fixtures(work: Path, mixture: bool) -> tuple[Path, Path]:
    """A two-layer Llama, or Qwen3-MoE, with random weights, its tokenizer, and the shipped chats to train it on."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

    texts = [json.loads(line)["messages"][0]["content"] for line in CHATS.read_text().splitlines()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, special_tokens=["<end>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4}
    mixed = Qwen3MoeConfig(vocab_size=len(fast), head_dim=16, **sizes, **experts)
    config = mixed if mixture else LlamaConfig(vocab_size=len(fast), **sizes)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(work / "model")
    fast.save_pretrained(work / "model")
    data = work / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return work / "model", data


def keep(number: int, rows: list[dict[str, Any]]) -> None:
    """Puts a chain's rows in place of those that it had."""
    deaths_by_life = json.loads(DATA.read_text()) if DATA.exists() else {}
    DATA.write_text(json.dumps({**deaths_by_life, str(number): rows}, indent=1) + "\n")


def table(deaths_by_life: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One line per chain: kills, those inside a save, steps lost to them, and the losses of the run that came of it."""
    titles = [
        "run",
        "kills",
        "inside a save",
        "left half-written",
        "resumed from the newest complete",
        "steps lost, most",
    ]
    lines = ["| " + " | ".join([*titles, "losses apart"]) + " |", "|---" * (len(titles) + 1) + "|"]
    for number, (engine, method, _) in enumerate(CHAINS):
        *kills, end = deaths_by_life[str(number)]
        right = sum(kill["resumed"] == kill["expected"] for kill in kills)
        counts = [len(kills), sum(kill["saving"] for kill in kills), sum(kill["half_written"] > 0 for kill in kills)]
        cells = [f"{engine}, {method}", *map(str, counts), f"{right}/{len(kills)}"]
        lines.append(
            "| " + " | ".join([*cells, str(max(kill["lost"] for kill in kills)), f"{end['apart']:.1e}"]) + " |"
        )
    return lines


def write(deaths_by_life: dict[str, list[dict[str, Any]]]) -> None:
    """Replaces this benchmark's part of RESULTS.md."""
    kills = sum(len(rows) - 1 for rows in deaths_by_life.values())
    text = f"SIGKILL to all ranks, {kills} times; seed {SEED}, {RANKS} ranks, on some meshes 4, "
    text += f"a checkpoint every {SAVE_STEPS} steps."
    part = [
        "## Kills",
        "",
        f"`python benchmarks/kills.py --chain 0` to `{len(CHAINS) - 1}`, then `--write`",
        "",
        text,
        "",
    ]
    results.keep("kills", [*part, *table(deaths_by_life)])


if __name__ == "__main__":
    main()
