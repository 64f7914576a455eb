"""`accel-fsdp convert`: training goes on under another engine, on another number of ranks, as if it hadn't moved."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Finished, accelerate_launch, made_yaml, write_texts
from jobs import save
from reference import job_words, losses_of
from transformers import AutoConfig, AutoModelForCausalLM

from accel_fsdp import conversion
from accel_fsdp.checkpoints import completeness, marker

MOMENTS = ROOT / "tests" / "moments.py"
STEPS, SAVED, GLOBAL_BATCH = 9, 4, 12
ENGINES = ("fsdp1", "fsdp2", "native", "zero1", "zero2", "zero3")
ALWAYS = (("fsdp2", "zero3"), ("zero3", "fsdp1"))
SIZES = {
    **{"vocab_size": 512, "hidden_size": 36, "intermediate_size": 70, "num_hidden_layers": 2, "head_dim": 6},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
}
VARIED = ["--lr_scheduler_type", "cosine", "--warmup_steps", "2", "--train_sampling_strategy", "random"]
VARIED += ["--weight_decay", "0.1"]


@dataclass(frozen=True)
class Source:
    """A run of one engine on two ranks that was never stopped, with what it held when it saved step SAVED."""

    run: Path
    losses: list[float]
    moments: dict[str, dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]

    @property
    def checkpoint(self) -> Path:
        return self.run / f"checkpoint-{SAVED}"


Sources = Callable[[str], Source]


def made(folder: Path, tokenizer: Path, tied: bool) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **SIZES, tie_word_embeddings=tied)
    return save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder, tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """With a head of its own, which the plans of tensor parallelism ask for."""
    return made(tmp_path_factory.mktemp("model") / "qwen3", tiny_model, tied=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("rows") / "rows.jsonl", 60)


def launched(engine: str, ranks: int, folder: Path, words: list[str], model: Path, **environment: str) -> Finished:
    shared = 2 if engine == "native" else 1  # ranks of tensor parallelism train on the same rows
    per_rank = ["--per_device_train_batch_size", str(GLOBAL_BATCH * shared // ranks)]
    if engine.startswith("zero"):
        config = ROOT / "accelerate_configs" / f"{engine}.yaml"
    else:
        config = folder / f"{engine}.yaml"
        flags = {"model": str(model), "num_processes": str(ranks), "mixed_precision": "no"}
        flags |= {"fsdp_version": "1" if engine == "fsdp1" else "2", "state_dict_type": "SHARDED_STATE_DICT"}
        config.write_text(made_yaml(**flags, **({"tp": "2"} if engine == "native" else {})))
    launcher = ["--mixed_precision", "no", "--num_processes", str(ranks)]
    return accelerate_launch(
        config, MOMENTS, *words, *VARIED, *per_rank, launcher=launcher, PROBE_OUT=str(folder), **environment
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, model: Path, rows: Path) -> Sources:
    known: dict[str, Source] = {}

    def source(engine: str) -> Source:
        if engine not in known:
            folder = tmp_path_factory.mktemp(engine)
            words = job_words(model, rows, folder / "run", STEPS, 0, save_steps=SAVED)
            finished = launched(engine, 2, folder, words, model, PROBE_SAVES="1")
            assert finished.code == 0, finished.output
            noted = [torch.load(folder / f"{what}-{SAVED}.pt", weights_only=True) for what in ("moments", "weights")]
            known[engine] = Source(folder / "run", losses_of(folder / "run", STEPS), *noted)
        return known[engine]

    return source


def assert_equal(loaded: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("engine", "target"),
    [pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.slow) for pair in product(ENGINES, ENGINES)],
)
def test_training_goes_on_under_another_engine(
    engine: str, target: str, sources: Sources, model: Path, rows: Path, tmp_path: Path
) -> None:
    """On three ranks instead of two, or four where two of them share a layer."""
    source, ranks, run = sources(engine), 4 if target == "native" else 3, tmp_path / "run"
    out = run / source.checkpoint.name
    flags = {"ranks": ranks} if target.startswith("zero") else {}
    assert conversion.convert(conversion.ConvertCommand(source.checkpoint, out, to=target, **flags)) == 0  # type: ignore[arg-type]
    assert not completeness.flaw(out)
    assert not marker.damage(out)

    words = job_words(model, rows, run, STEPS, 0, save_steps=SAVED)
    finished = launched(target, ranks, tmp_path, [*words, "--resume_from_checkpoint", "true"], model)
    assert finished.code == 0, finished.output
    loaded = torch.load(tmp_path / "moments.pt", weights_only=True)
    assert loaded.keys() == source.moments.keys()
    for name, state in source.moments.items():
        assert_equal(*({key: of[key] for key in ("exp_avg", "exp_avg_sq")} for of in (loaded[name], state)))
        assert state["exp_avg"].abs().sum() > 0
    assert_equal(torch.load(tmp_path / "weights.pt", weights_only=True), source.weights)
    assert losses_of(run, STEPS) == pytest.approx(source.losses, rel=1e-6)


@pytest.mark.slow
def test_a_head_that_is_the_embedding(rows: Path, tiny_model: Path, tmp_path: Path) -> None:
    """From FSDP2 to ZeRO-3, and four steps later to FSDP1: DeepSpeed stores the tensor once, FSDP under both names."""
    model, last = made(tmp_path / "tied", tiny_model, tied=True), 2 * SAVED
    straight = job_words(model, rows, tmp_path / "run", STEPS, 0, save_steps=SAVED)
    assert launched("fsdp2", 2, tmp_path, straight, model).code == 0
    for engine, before, step in (("zero3", "run", SAVED), ("fsdp1", "zero3", last)):
        name, run = f"checkpoint-{step}", tmp_path / engine
        flags = {"ranks": 3} if engine == "zero3" else {}
        command = conversion.ConvertCommand(tmp_path / before / name, run / name, to=engine, **flags)  # type: ignore[arg-type]
        assert conversion.convert(command) == 0
        words = job_words(model, rows, run, STEPS, 0, save_steps=SAVED)
        finished = launched(engine, 3, tmp_path, [*words, "--resume_from_checkpoint", "true"], model)
        assert finished.code == 0, finished.output
        assert losses_of(run, STEPS) == pytest.approx(losses_of(tmp_path / "run", STEPS), rel=1e-6)
