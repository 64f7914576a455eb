"""One job under every engine: `train/sft.py` with the shipped YAMLs, `train/native.py` and torchrun.

All must have the losses and weights of `reference.py`'s plain loop. A launch runs several jobs: most of it is imports.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Finished, accelerate_launch, free_port, made_yaml, run, together
from jobs import PROBE, Jobs, launch, probed, save
from offline import assert_exports_offline
from peft import PeftModel
from reference import LEARNING_RATE, LORA_LEARNING_RATE, Reference, job_words, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel_fsdp.checkpoints import discover, open_checkpoint
from accel_fsdp.models import state_bytes
from accel_fsdp.units import GIB, MIB

FOLDER = ROOT / "accelerate_configs"
PROBE_NATIVE = ROOT / "tests" / "probe_native.py"
SCARCE = ROOT / "tests" / "scarce.py"
STEPS = 4
GLOBAL_BATCH = 4
RANKS = 2
TOLERANCE = 1e-4
LORA = ["--use_peft", "--lora_dropout", "0.0", "--learning_rate", str(LORA_LEARNING_RATE)]
EVALUATED = ["--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "2"]
EVALUATED += ["--dataset_test_split", "train"]
SMOOTH = ["--label_smoothing_factor", "0.5", "--eval_strategy", "steps", "--eval_steps", str(STEPS)]
SMOOTH += ["--dataset_test_split", "train", "--per_device_eval_batch_size", "5"]
"""48 rows: the last batches have 3 rows on one process, 5 and 3 on two, 5, 3, none and none on four."""
UNTRAINED = [*SMOOTH, "--learning_rate", "0", "--max_length", "256", "--max_steps", "1", "--eval_steps", "1"]
HELD_OUT = {"packed": [*UNTRAINED, "--packing", "true"], "streamed": [*UNTRAINED, "--streaming", "true"]}
"""Six packed rows: of four ranks three evaluate none."""
SHIPPED = {
    "ddp": 1,  # first: the patches of FSDP on CPUs would stay
    "fsdp1_full_shard": 2,
    "fsdp1_shard_grad_op": 2,
    "fsdp1_no_shard": 1,
    "fsdp1_hybrid_shard": 2,
    "fsdp1_hybrid_shard_zero2": 2,
    "fsdp2": 2,
    "fsdp2_no_reshard": 2,
    "fsdp2_hybrid_2x8": 2,
    "zero1": 1,
    "zero2": 1,
    "zero3": 1,
}
"""Ranks that share one copy of the parameters. DeepSpeed keeps tensors as small as these whole under ZeRO-3 too."""
TOGETHER = tuple(name for name in SHIPPED if name != "fsdp2_hybrid_2x8" and not name.startswith("zero"))
"""Those that share a launch; the others have one each."""
SMOOTHED = ("fsdp1_full_shard", "fsdp2", "zero3")


def sft_args(model: Path, data: Path, output: Path, per_rank: int = GLOBAL_BATCH // RANKS) -> list[str]:
    return job_words(model, data, output, STEPS, per_rank)


def plain(model: Path, data: Path, **how: Any) -> Reference:
    return train(model, data, steps=STEPS, global_batch=GLOBAL_BATCH, **how)


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory, text_data: Path) -> Path:
    """Rows of two global batches and a quarter of one."""
    path = tmp_path_factory.mktemp("data") / "nine.jsonl"
    path.write_text("".join(text_data.read_text().splitlines(True)[:9]))
    return path


def assert_like(jobs: Jobs, name: str, base: Path, reference: Reference) -> None:
    """What was logged, exported weights and the logits before the export are the reference's; the folder loads."""
    seen = jobs.noted(name)
    assert seen["losses"] == pytest.approx(reference.losses, abs=TOLERANCE)
    assert seen["norms"] == pytest.approx(reference.norms, rel=20 * TOLERANCE)
    assert seen["accuracies"][:STEPS] == pytest.approx(reference.accuracies, abs=1e-9)
    if seen["held_out"]:
        assert seen["accuracies"][STEPS:] == pytest.approx([reference.held_out_accuracy], abs=1e-9)
        assert seen["held_out"] == pytest.approx([reference.held_out], abs=TOLERANCE / 10)
    model = loaded(jobs.folder / name / "final", base)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, reference.weights[key], atol=5 * TOLERANCE, rtol=0)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.arange(3, 43).reshape(2, 20)).logits
    torch.testing.assert_close(logits, jobs.logits(name), atol=1e-5, rtol=1e-5)


def loaded(folder: Path, base: Path) -> torch.nn.Module:
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).merge_and_unload()


def ranks_of(name: str) -> int:
    return 4 if name == "fsdp2_hybrid_2x8" else RANKS


def jobs_of(name: str, folder: Path, model: Path, data: Path, nine: Path) -> dict[str, list[str]]:
    """A YAML as shipped, but in float32, with 2 CPU processes, or 4 where it makes a mesh: full training and more.

    Of full training, the third step has a quarter of a batch.
    """
    text = (FOLDER / f"{name}.yaml").read_text().replace("mixed_precision: bf16", "mixed_precision: 'no'")
    text = text.replace("dp_shard_size: 8", "dp_shard_size: 2").replace("num_machines: 2", "num_machines: 1")
    (folder / f"{name}.yaml").write_text(text.replace("num_processes: 16", "num_processes: 4"))
    shared = ["--config_file", str(folder / f"{name}.yaml")]
    shared += sft_args(model, data, folder, GLOBAL_BATCH // ranks_of(name))
    saved = ["--save_strategy", "steps", "--save_steps", str(STEPS)] if name.startswith("zero") else []
    words = {"full": ["--dataset_name", str(nine), *saved], "lora": LORA}
    words |= {"smooth": SMOOTH, "smooth-lora": [*LORA, *SMOOTH]} if name in SMOOTHED else {}
    words |= HELD_OUT if name in ("fsdp2", "fsdp2_hybrid_2x8") else {}
    jobs = {f"{name}-{kind}": [*shared, *more] for kind, more in words.items()}
    if name == "zero3":  # under its own bf16
        own = ["--config_file", str(FOLDER / "zero3.yaml"), "--dtype", "bfloat16"]
        jobs["zero3-lora16"] = [*own, *shared[2:], *LORA]
    return jobs


@pytest.fixture(scope="module")
def shipped(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, text_data: Path, nine: Path
) -> Callable[[str], Jobs]:
    """The launch that a YAML is in."""
    known: dict[str, Jobs] = {}

    def made(name: str) -> Jobs:
        if name not in known:
            folder, names = tmp_path_factory.mktemp("shipped"), TOGETHER if name in TOGETHER else (name,)
            jobs: dict[str, list[str]] = {}
            for each in names:
                jobs |= jobs_of(each, folder, tiny_model, text_data, nine)
            known.update(dict.fromkeys(names, launch(jobs, folder, ["--num_processes", str(ranks_of(name))])))
        return known[name]

    return made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in TOGETHER else pytest.mark.slow) for name in SHIPPED]
)
def test_shipped_yaml_trains_as_plain_pytorch_does(
    name: str, shipped: Callable[[str], Jobs], tiny_model: Path, text_data: Path, nine: Path, tmp_path: Path
) -> None:
    made, full = shipped(name), f"{name}-full"
    reference = plain(tiny_model, nine)
    assert_like(made, full, tiny_model, reference)
    assert_like(made, f"{name}-lora", tiny_model, plain(tiny_model, text_data, lora=True))
    if name in SMOOTHED:
        assert_like(made, f"{name}-smooth", tiny_model, plain(tiny_model, text_data, smoothing=0.5))
        assert_like(made, f"{name}-smooth-lora", tiny_model, plain(tiny_model, text_data, lora=True, smoothing=0.5))
        card = (made.folder / f"{name}-smooth" / "final" / "README.md").read_text()
        assert "The training loss is smoothed (label_smoothing_factor 0.5)" in card
        assert "| label_smoothing_factor | 0.5 |" in card
        assert f" on {RANKS} ranks, cpu" in card
    if name == "zero3":  # an adapter that is added to a model in parts stays in float32
        adapter = load_file(made.folder / "zero3-lora16" / "final" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
        assert made.noted("zero3-lora16")["losses"] == pytest.approx(
            plain(tiny_model, text_data, lora=True).losses, abs=5e-2
        )
    for job in {f"{name}-{kind}" for kind in HELD_OUT} & made.printed.keys():
        untrained = train(tiny_model, text_data, steps=0, global_batch=1)
        assert made.noted(job)["held_out"] == pytest.approx([untrained.held_out], abs=TOLERANCE / 10)
    assert_shared_out(name, made, full, ranks_of(name), reference)
    if name.startswith("zero"):
        assert_exports_offline(made.folder / full, tmp_path / "offline")
        assert_holds_moments(made.folder / full, reference)
        assert_takes_what_is_predicted(made.folder / full / f"checkpoint-{STEPS}", int(name[-1]), reference)


def assert_shared_out(name: str, jobs: Jobs, run: str, ranks: int, reference: Reference) -> None:
    """Each rank holds the share that the YAML asks for, and the run says so."""
    total = sum(tensor.numel() for tensor in reference.weights.values())
    for rank in range(ranks):
        seen = jobs.noted(run, rank)
        assert seen["held"] == pytest.approx(total / SHIPPED[name], rel=0.02)
        assert seen["kinds"] == (["DTensor"] if name.startswith("fsdp2") else ["Parameter"])
        assert seen["stage"] == (int(name[-1]) if name.startswith("zero") else 0)
    if name.startswith("fsdp"):
        assert f"sharding: {name[:5].upper()}" in jobs.printed[run]
        [(held, of)] = re.findall(r"each rank holds ([\d.]+) M of ([\d.]+) M", jobs.printed[run])
        assert float(held) / float(of) == pytest.approx(1 / SHIPPED[name], abs=0.02)


def assert_holds_moments(run_folder: Path, reference: Reference) -> None:
    """Those of ZeRO's flat partitions, each under its parameter's name."""
    stored = open_checkpoint.read(discover.find(run_folder)[0], optimizer=True).optimizer
    tensors = {name: tensor.load() for name, tensor in stored.items()}
    steps = {name for name in tensors if name.endswith(".step")}
    assert {int(tensors[name]) for name in steps} == {STEPS}
    assert tensors.keys() - steps == reference.moments.keys()
    for name, moment in reference.moments.items():
        torch.testing.assert_close(tensors[name], moment, rtol=1e-3, atol=1e-3 * moment.abs().max().item())


def assert_takes_what_is_predicted(checkpoint: Path, stage: int, reference: Reference) -> None:
    """The weights and the optimizer of ZeRO, as planner and trainer reckon them; zip and pickle take some more."""
    weights = sum(tensor.numel() for tensor in reference.weights.values()) * state_bytes.MASTER
    predicted = state_bytes.checkpoint_bytes(weights, 2 * weights, zero_stage=stage, forward=weights)
    files = [*checkpoint.glob("global_step*/*.pt"), *checkpoint.glob("*.safetensors")]
    assert sum(path.stat().st_size for path in files) == pytest.approx(predicted, rel=0.05)


def torchrun(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *map(str, words)]


def on_two_nodes(words: dict[int, Sequence[str | Path]], **environment: str) -> list[Finished]:
    """Two agents of one rank that meet by c10d, as on two machines, of which number 1 is the host."""
    endpoint = f"127.0.0.1:{free_port()}"
    agents = [
        torchrun(
            *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"),
            *("--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={host}", *own),
        )
        for host, own in words.items()
    ]
    return together(agents, **environment)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_torchrun_on_two_nodes_reads_the_yaml(engine: str, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Number and addresses of the YAML's machines don't count."""
    config = tmp_path / "two.yaml"
    shipped = "fsdp2_two_nodes" if engine == "fsdp2" else engine
    config.write_text(
        (FOLDER / f"{shipped}.yaml").read_text().replace("mixed_precision: bf16", "mixed_precision: 'no'")
    )
    args = [*sft_args(tiny_model, text_data, tmp_path), "--accelerate_config", str(config)]
    words, variables = probed({"full": args, "lora": [*args, *LORA]}, tmp_path)
    first, second = on_two_nodes({host: [PROBE, *words] for host in (1, 0)}, **variables)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert ("sharding: FSDP2" if engine == "fsdp2" else "running real DeepSpeed") in first.output + second.output
    assert_like(Jobs(tmp_path, {}), "full", tiny_model, plain(tiny_model, text_data))
    assert_like(Jobs(tmp_path, {}), "lora", tiny_model, plain(tiny_model, text_data, lora=True))


def test_two_machines_without_a_shared_disk_are_refused(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Each would keep its own ranks' shards, and every checkpoint would look complete on the first of them."""
    config = ("--accelerate_config", FOLDER / "fsdp2_two_nodes.yaml")
    words = {host: [SCARCE, *sft_args(tiny_model, text_data, tmp_path / f"disk-{host}"), *config] for host in (1, 0)}
    first, second = on_two_nodes(words, SCARCE="patience")
    assert first.code != 0
    assert second.code != 0
    assert "is not the same folder on all machines" in first.output + second.output
    assert not list(tmp_path.rglob("checkpoint-*"))
    assert not list(tmp_path.rglob(".shared-*"))


def test_one_yaml_decides(
    sft: Callable[..., Finished], tiny_model: Path, text_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is what Accelerate's launcher leaves."""
    args = [*sft_args(tiny_model, text_data, tmp_path / "run"), "--accelerate_config", FOLDER / "ddp.yaml"]
    both = sft(*args)
    assert both.code == 2
    assert "--accelerate_config under accelerate launch" in both.output
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    none = sft(*args)
    assert none.code == 1
    assert "torchrun --standalone --nproc-per-node N train/sft.py --accelerate_config" in none.output


def with_more_tokens(model: Path, folder: Path) -> Path:
    """The same model with a tokenizer that has learnt two tokens."""
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.flaky(reruns=1, only_rerun="Attempted to make a tensor into a differentiable view")
# DeepSpeed prints its parameters when it starts. Once, in the second engine of a process, torch couldn't.
@pytest.mark.parametrize("name", ["fsdp1_full_shard", "fsdp2_checkpointing", "zero3"])
def test_methods_and_checkpointing(name: str, tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """Recomputing changes no loss; DoRA starts where LoRA does and goes elsewhere; new tokens have rows; QLoRA."""
    larger = with_more_tokens(tiny_model, tmp_path / "larger")
    recomputed = ["--gradient_checkpointing", "true"]
    more = {
        **{"full": recomputed, "lora": [*LORA, *recomputed]},
        "resized": ["--model_name_or_path", str(larger), "--resize_vocab", *recomputed],
    }
    if name != "fsdp1_full_shard":
        more["dora"] = [*LORA, "--use_dora", "--lora_dropout", "0.1", *recomputed]
    else:
        more["best"] = [*LORA, "--load_best_model_at_end", "true", *EVALUATED, *recomputed]
    if name != "zero3":
        more["qlora"] = [*LORA, "--load_in_4bit", "--bnb_4bit_quant_storage", "float32", *recomputed]
    shared = sft_args(tiny_model, text_data, tmp_path)
    jobs = {job: [*shared, *words] for job, words in more.items()}
    jobs["full"] = ["--config_file", str(FOLDER / f"{name}.yaml"), *jobs["full"]]
    made = launch(jobs, tmp_path, ["--mixed_precision", "no", "--num_processes", str(RANKS)])
    lora_reference = plain(tiny_model, text_data, lora=True)
    assert_like(made, "full", tiny_model, plain(tiny_model, text_data))
    assert_like(made, "lora", tiny_model, lora_reference)
    if "dora" in more:
        dora = made.noted("dora")["losses"]
        assert dora[0] == pytest.approx(lora_reference.losses[0], abs=TOLERANCE)
        assert dora != pytest.approx(lora_reference.losses, abs=TOLERANCE)
        tensors = load_file(tmp_path / "dora" / "final" / "adapter_model.safetensors")
        assert sum("magnitude" in key for key in tensors) == 14
    if "qlora" in more:
        quantized = plain(tiny_model, text_data, lora=True, quantized=True)
        assert quantized.losses != pytest.approx(lora_reference.losses, abs=TOLERANCE)
        assert made.noted("qlora")["losses"] == pytest.approx(quantized.losses, abs=TOLERANCE)
        held = [re.findall(r"each rank holds \S+ M of (\S+) M", made.printed[job]) for job in ("lora", "qlora")]
        assert held[0] == held[1] != []  # packed weights count as what they stand for
    output = "".join(made.printed.values())
    assert "Did not find param" not in output  # by FSDP1 of each weight that an adapter's checkpoint lacks
    own = "checkpointing: FSDP's own, as the YAML says" in output
    layers = "checkpointing: the layers' own, as accelerate 1.15 under FSDP2 repeats dropout" in output
    assert (own, layers) == ((name == "fsdp2_checkpointing",) * 2)
    resized = load_file(tmp_path / "resized" / "final" / "model.safetensors")
    assert [resized[key].shape[0] for key in ("model.embed_tokens.weight", "lm_head.weight")] == [511, 511]


def test_only_rank_0_holds_the_weights_it_reads(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """A bfloat16 checkpoint of 21 M parameters is 86 MB in float32; transformers alone makes that on each rank."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "vocab_size": 509}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8)).to(torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters())
    save(model, tmp_path / "model", tiny_model)
    config = tmp_path / "fsdp.yaml"
    config.write_text(made_yaml(model=str(tmp_path / "model"), num_processes="2", mixed_precision="no"))
    args = [*sft_args(tmp_path / "model", text_data, tmp_path / "run"), "--max_steps", "1"]
    finished = accelerate_launch(config, ROOT / "train" / "sft.py", *args)
    assert finished.code == 0, finished.output
    match = re.search(r"peak of rank 0 ([\d.]+) ([GM]iB), of the others at most ([\d.]+) ([GM]iB)", finished.output)
    assert match, finished.output
    first, other = (float(match[place]) * {"GiB": GIB, "MiB": MIB}[match[place + 1]] for place in (1, 3))
    assert first - other > 0.5 * 4 * total  # its shards and one tensor are there too


NATIVE_RUNS = {
    "fsdp2": [],
    "fsdp2-size": ["--strategy", "shard_grad_op", "--wrap", "size", "--min_num_params", "10000"],
    "fsdp2-hybrid": ["--strategy", "hybrid_shard", "--shard_ranks", "1", *("--gradient_accumulation_steps", "2")],
    "fsdp1": ["--fsdp_version", "1"],
    "fsdp1-hybrid": ["--fsdp_version", "1", "--strategy", "hybrid_shard", "--cpu_offload"],
    "fsdp1-size": ["--fsdp_version", "1", "--strategy", "hybrid_shard_zero2", "--wrap", "size"],
    "fsdp2-lora": ["--lora_r", "16"],
    "fsdp2-bf16": ["--mixed_precision", "bf16"],
}


def native(ranks: int, model: Path, data: Path, runs: Sequence[Sequence[str]]) -> Finished:
    shared = ["--model_name_or_path", model, "--dataset_name", data, "--learning_rate", str(LEARNING_RATE)]
    shared += ["--lr_scheduler_type", "constant", "--no-shuffle"]
    shared += ["--max_steps", str(STEPS), "--save_steps", str(STEPS // 2)]
    jobs = [word for run in runs for word in ("RUN", *run)]
    return run(torchrun("--standalone", "--nproc-per-node", ranks, PROBE_NATIVE, *shared, *jobs))


def test_native_trains_as_one_plain_process_does(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    runs = []
    for name, flags in NATIVE_RUNS.items():
        batch = "1" if "--gradient_accumulation_steps" in flags else "2"
        rate = ["--learning_rate", str(LORA_LEARNING_RATE)] if "lora" in name else []
        runs.append(["--output_dir", str(tmp_path / name), "--per_device_train_batch_size", batch, *flags, *rate])
    finished = native(RANKS, tiny_model, text_data, runs)
    assert finished.code == 0, finished.output
    for name in NATIVE_RUNS:
        expected = plain(tiny_model, text_data, lora="lora" in name)
        tolerance = 3e-2 if "bf16" in name else TOLERANCE
        measured = json.loads((tmp_path / name / "measured.json").read_text())
        assert measured["losses"] == pytest.approx(expected.losses, abs=tolerance), name
        assert measured["seconds"] > 0
        assert measured["peak_bytes"] > 2**20
        for key, tensor in loaded(tmp_path / name / "final", tiny_model).state_dict().items():
            torch.testing.assert_close(tensor, expected.weights[key], atol=10 * tolerance, rtol=0)


@pytest.mark.slow
def test_native_resumes_on_three_ranks(tiny_model: Path, text_data: Path, tmp_path: Path) -> None:
    """A checkpoint of 2 ranks goes on where it was on 3, under the other FSDP and in an epoch's middle."""
    begun = [["--output_dir", str(tmp_path / f"from-{version}"), "--fsdp_version", str(version)] for version in (1, 2)]
    batch = ["--per_device_train_batch_size", "3"]
    assert (first := native(2, tiny_model, text_data, [[*entry, *batch] for entry in begun])).code == 0, first.output
    expected = train(tiny_model, text_data, steps=STEPS, global_batch=6)
    resumed = []
    for version in (1, 2):
        out = tmp_path / f"from-{version}"
        assert json.loads((out / "measured.json").read_text())["losses"] == pytest.approx(
            expected.losses, abs=TOLERANCE
        )
        (out / f"checkpoint-{STEPS}" / ".metadata").unlink()  # half-written
        resumed.append(["--output_dir", str(out), "--fsdp_version", str(3 - version), "--resume"])
    batch = ["--per_device_train_batch_size", "2"]
    again = native(3, tiny_model, text_data, [[*entry, *batch] for entry in resumed])
    assert again.code == 0, again.output
    for version in (1, 2):
        measured = json.loads((tmp_path / f"from-{version}" / "measured.json").read_text())
        assert measured["losses"] == pytest.approx(expected.losses[STEPS // 2 :], abs=TOLERANCE)
        exported = load_file(tmp_path / f"from-{version}" / "final" / "model.safetensors")
        for key, tensor in exported.items():
            torch.testing.assert_close(tensor, expected.weights[key], atol=TOLERANCE, rtol=0)
