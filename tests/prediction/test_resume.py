"""The predicted peak of a resume, against the storages of real ranks that load a checkpoint."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SFT, accelerate_launch, made_yaml
from reference import job_words
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accel_fsdp.config import read_config
from accel_fsdp.job import Job, from_yaml
from accel_fsdp.prediction.memory import BUFFERS, Resume, predict, resumed, variant_for
from accel_fsdp.prediction.tracing import by_name

RESUMED = ROOT / "tests" / "resumed.py"
SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
TENSOR = 4 * SIZES["vocab_size"] * SIZES["hidden_size"]
ENGINES = {
    "fsdp2": {"fsdp_version": "2", "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp2 full": {"fsdp_version": "2", "state_dict_type": "FULL_STATE_DICT"},
    "fsdp1": {"fsdp_version": "1", "state_dict_type": "SHARDED_STATE_DICT"},
    "fsdp1 full": {"fsdp_version": "1", "state_dict_type": "FULL_STATE_DICT"},
    "ddp": {"engine": "ddp"},
    "zero2": {"engine": "deepspeed", "zero_stage": "2"},
    "zero3": {"engine": "deepspeed", "zero_stage": "3"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Path]:
    """A Llama of 5.6 M parameters, and a cache for its traces."""
    folder = tmp_path_factory.mktemp("resumed") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        yield folder


def run_and_resumed(config: Path, model: Path, data: Path, *more: str) -> list[dict[str, Any]]:
    """A run of one step and its resume: what each rank held while it loaded."""
    run = config.with_suffix("")
    for step, script in enumerate((SFT, RESUMED), start=1):
        words = [*job_words(model, data, run, step, 2, save_steps=1), *more, "--resume_from_checkpoint", "auto"]
        finished = accelerate_launch(config, script, *words, OMP_NUM_THREADS="1", PROBE_OUT=str(config.parent))
        assert finished.code == 0, finished.output[-3000:]
    return [json.loads(path.read_text()) for path in sorted(config.parent.glob("resumed-*.json"))]


def predicted(job: Job, model: Path) -> tuple[Resume, int]:
    """The resume, and what it leaves, without buffers."""
    shape, tapes = by_name.read_shape(str(model), job.recipe)
    step = predict(shape, tapes[variant_for(job.recipe, job.layout)], job.recipe, job.layout)
    peak = resumed(shape, job.recipe, job.layout, step, job.state_dict)
    assert peak is not None
    buffers = step.moments[-1].live[BUFFERS]
    return Resume(peak.device - buffers, peak.host), step.moments[0].total - buffers


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_resume_holds_what_is_predicted(name: str, ranks: int, model: Path, text_data: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    fixed = {"model": str(model), "gpus": "cpu", "num_processes": str(ranks), "mixed_precision": "no"}
    config.write_text(made_yaml(**fixed, **ENGINES[name]))
    seen = run_and_resumed(config, model, text_data)
    assert len(seen) == ranks
    job = from_yaml.job_of(read_config(config)[0]).with_recipe(length=32)
    peak, kept = predicted(job, model)
    device, after = (max(rank[key] for rank in seen) for key in ("device", "after"))
    if name.startswith("zero"):  # of which a step is only estimated
        assert device <= after
    else:
        assert device == pytest.approx(peak.device, rel=0.02)
        assert after == pytest.approx(kept, rel=0.01)
    host = max(map(sum, zip(*(rank["host"] for rank in seen), strict=True)))
    assert host == pytest.approx(peak.host, rel=0.05, abs=2 * ranks * TENSOR)  # a rank reads one tensor after another
