"""Which mistakes a rehearsal finds: `python benchmarks/mistakes.py --write`, on two cores.

Each of `benchmarks/mistakes/` is rehearsed with two ranks: scripts `issue_` have a mistake that somebody reported in
public, scripts `own_` one of another kind, scripts `unseen_` one by someone who had not seen the tool, and scripts
`right_` only look unusual. A mistake is found if the rehearsal fails and says why, and placed if it names the key or
one of the lines that end in `# wrong`. `--public FOLDER` also rehearses scripts of others, which must pass: FOLDER
holds clones of their repositories, at the commits of `public.json` or later ones, and its `packages` are installed. A
script there with a `mistake` was taken for a right one until a rehearsal failed.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import results
import yaml
from children import environment

FOLDER = Path(__file__).parent / "mistakes"
TABLE: dict[str, dict[str, Any]] = json.loads((FOLDER / "table.json").read_text())
"""Of each script the YAML it is rehearsed with, and of each mistake what a rehearsal has to say of it (a regular
expression), the key to blame where it is one of the YAML, and the issue it comes from."""

PUBLIC: dict[str, dict[str, Any]] = json.loads((FOLDER / "public.json").read_text())["scripts"]
"""Others' scripts, as REPOSITORY:PATH, with their YAML and arguments."""

COMMON = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "num_processes": 2, "num_machines": 1}
SHARDED = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_offload_params": False,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}
FSDP1 = {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_sync_module_states": True}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": COMMON | {"distributed_type": "MULTI_GPU", "gpu_ids": "all"},
    "fsdp1": COMMON | {"distributed_type": "FSDP", "fsdp_config": FSDP1 | {"fsdp_use_orig_params": True, **SHARDED}},
    "fsdp2": COMMON
    | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, **SHARDED}},
}


class Judged(NamedTuple):
    """What became of one script."""

    name: str
    failed: bool
    said: str
    blamed: str
    found: bool
    placed: bool


def config(row: dict[str, Any]) -> dict[str, Any]:
    """The YAML of one script: its engine's, with the keys of its own."""
    whole = ENGINES[row["engine"]]
    own = row.get("config", {})
    inner = {key: value for key, value in own.items() if key.startswith("fsdp_")}
    outer = {key: value for key, value in own.items() if key not in inner}
    return {**whole, **outer, **({"fsdp_config": whole["fsdp_config"] | inner} if inner else {})}


def rehearsed(
    script: Path, keys: dict[str, Any], arguments: list[str], folder: Path, limit: int, **variables: str
) -> dict[str, Any]:
    """The report of one rehearsal, with `folder` as the working directory."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(keys, sort_keys=False))
    command = [sys.executable, "-m", "accel_fsdp", "rehearse", str(file), "--json", "--script", str(script)]
    done = subprocess.run(
        [*command, "--timeout", str(limit), *(["--", *arguments] if arguments else [])],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
        env=environment(**variables),
    )
    if "{" not in done.stdout:
        refused = {"said": done.stderr.strip()[-500:], "key": "", "line": "", "passed": False}
        return {"passed": False, "steps": [refused]}
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def marked(script: Path) -> set[str]:
    """The lines that are to blame, as a report names them."""
    lines = enumerate(script.read_text().splitlines(), 1)
    return {f"{script.name}:{number}" for number, line in lines if line.endswith("# wrong")}


def judged(name: str, limit: int) -> Judged:
    """Rehearses one script of `benchmarks/mistakes/`."""
    row, script = TABLE[name], FOLDER / f"{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        report = rehearsed(script, config(row), [], Path(folder), limit)
    step = next((step for step in report["steps"] if not step["passed"]), None)
    if step is None:
        return Judged(name, False, report["steps"][-1]["said"], "", False, False)
    is_found = bool("says" in row and re.search(row["says"], step["said"]))
    blamed = " ".join(filter(None, [step["key"], step["line"]]))
    named = set(re.findall(r"\w+\.py:\d+", f"{step['line']} {step['said']}"))
    placed = row.get("key") == step["key"] != "" or bool(marked(script) & named)
    return Judged(name, True, step["said"], blamed, is_found, is_found and placed)


def of_others(name: str, clones: Path, limit: int) -> Judged:
    """Rehearses a script of somebody else; its working directory has what it asks for by name.

    With `cwd` that is in a copy of its repository, whose packages are in `path`. What follows a # in a name tells rows
    of one script apart.
    """
    sys.path.insert(0, str(FOLDER))
    from common import public

    row = PUBLIC[name]
    repository, path = name.partition("#")[0].split(":")
    root = clones / repository
    with tempfile.TemporaryDirectory() as folder:
        public.make(Path(folder))
        if "cwd" in row:
            root = shutil.copytree(root, Path(folder), ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
        own = {"fsdp_transformer_layer_cls_to_wrap": row["layer"]} if "layer" in row else {}
        keys = config({"engine": row["engine"], "config": own | row.get("config", {})})
        packages = os.pathsep.join([environment()["PYTHONPATH"], str(root / row.get("path", "."))])
        variables = {"HF_HOME": f"{folder}/hub", "WANDB_MODE": "offline", "PYTHONPATH": packages}
        where = Path(folder) / row.get("cwd", ".")
        report = rehearsed(root / path, keys, row.get("arguments", []), where, limit, **variables)
    step = next((step for step in report["steps"] if not step["passed"]), None)
    sentence = (step or report["steps"][-1])["said"]
    return Judged(name, step is not None, sentence, " ".join([step["key"], step["line"]]) if step else "", False, False)


def counted(outcomes: list[Judged], prefix: str) -> str:
    """A line of the table of figures."""
    some = [outcome for outcome in outcomes if outcome.name.startswith(prefix)]
    found, placed = (sum(outcome.found for outcome in some), sum(outcome.placed for outcome in some))
    return f"{found} of {len(some)} | {placed} of {len(some)}"


def brief(text: str) -> str:
    """The first line of what a rehearsal said, without folders, for a cell of a table."""
    line = re.sub(r"/\S*/(\w+\.py)", r"\1", text.strip().split("\n", maxsplit=1)[0].split("; until then")[0])
    return line.replace("|", "\\|")[:300]


def written(outcomes: list[Judged]) -> None:
    """The section of RESULTS.md."""
    mistakes = [outcome for outcome in outcomes if outcome.name in TABLE and not outcome.name.startswith("right_")]
    first = [outcome for outcome in mistakes if not outcome.name.startswith("unseen_")]
    right = [outcome for outcome in outcomes if outcome.name.startswith("right_")]
    others = [outcome for outcome in outcomes if "mistake" not in PUBLIC.get(outcome.name, {"mistake": ""})]
    names = ("torch", "accelerate", "transformers", "peft", "trl")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    alarms = [outcome for outcome in [*right, *others] if outcome.failed]
    lines = f"""## Mistakes that a rehearsal finds

`python benchmarks/mistakes.py --write --public FOLDER`: scripts of `benchmarks/mistakes/` and unchanged ones of others,
each rehearsed with two ranks on a CPU; {versions}.
Found: the rehearsal fails for its reason. Placed: it also names the line or the key. The tool has seen these scripts:
what first runs missed was mended.

| scripts | found | placed |
|---|---|---|
| mistakes of public issues | {counted(outcomes, "issue_")} |
| mistakes of other kinds | {counted(outcomes, "own_")} |
| the {len(first)} | {counted(first, "")} |
| mistakes of other kinds, written by someone who had not seen the tool | {counted(outcomes, "unseen_")} |

Right scripts that fail: {sum(script.failed for script in right)} of {len(right)} unusual ones,
{sum(script.failed for script in others)} of {len(others)} of others.""".splitlines()
    lines += ["", "| right script that fails | what the rehearsal says |", "|---|---|"] if alarms else []
    lines += [f"| {outcome.name} | {brief(outcome.said)} |" for outcome in alarms]
    results.keep("mistakes", lines)


def main() -> None:
    """Rehearses, prints, and keeps the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="these alone")
    parser.add_argument("--limit", type=int, default=120, help="seconds that one launch may take")
    parser.add_argument("--log", type=Path, help="a file of outcomes: what is in it already is not run again")
    parser.add_argument("--write", action="store_true", help="write the section of RESULTS.md")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="clones of others' repositories")
    options = parser.parse_args()
    known: dict[str, Judged] = {}
    if options.log and options.log.exists():
        known = {row["name"]: Judged(**row) for row in map(json.loads, options.log.read_text().splitlines())}
    outcomes = []
    for name in options.names or [*TABLE, *(PUBLIC if options.public else ())]:
        outcome = known.get(name)
        if outcome is None:
            outcome = judged(name, options.limit) if name in TABLE else of_others(name, options.public, options.limit)
            print(json.dumps(outcome._asdict()), flush=True)
            if options.log:
                with options.log.open("a") as log:
                    log.write(json.dumps(outcome._asdict()) + "\n")
        outcomes.append(outcome)
    if options.write:
        written(outcomes)


if __name__ == "__main__":
    main()
