"""Rules about the installed versions: bugs that later releases fix."""

from collections.abc import Iterator

from accel_fsdp.config import LOW_DTYPES, Engine
from accel_fsdp.linter.rules.engine import Finding, Subject, rule


def older(subject: Subject, package: str, version: str) -> bool:
    from packaging.version import Version

    installed = subject.versions.get(package)
    return installed is not None and Version(installed) < Version(version)


@rule("AF701", fixed_in="accelerate 1.15", pains=("P92",))
def rank_0_adapter_only(subject: Subject) -> Iterator[Finding]:
    """FSDP2, LoRA and FULL_STATE_DICT before accelerate 1.15: checkpoints keep rank 0's slice of the adapter only."""
    if (
        subject.engine is Engine.FSDP2
        and subject.uses_adapter
        and subject.full_state_dict
        and older(subject, "accelerate", "1.15")
    ):
        yield Finding(
            "fsdp_config.fsdp_state_dict_type",
            "this accelerate keeps rank 0's slice of the adapter only",
            "a resumed adapter is mostly lost",
            "pip install 'accelerate>=1.15'",
        )


@rule("AF702", "warning", fixed_in="accelerate 1.15", pains=("P94",))
def checkpoints_of_children(subject: Subject) -> Iterator[Finding]:
    """FSDP2's activation checkpointing before accelerate 1.15 wraps a layer's children: 4 times the activations."""
    on = subject.engine is Engine.FSDP2 and subject.on("fsdp_activation_checkpointing")
    if on and older(subject, "accelerate", "1.15"):
        yield Finding(
            "fsdp_config.fsdp_activation_checkpointing",
            "this accelerate checkpoints inside the layers",
            "about 4 times the activation memory",
            "pip install 'accelerate>=1.15'",
        )


@rule("AF703", fixed_in="accelerate 1.15", pains=("P93",))
def tied_embeddings_on_new_torch(subject: Subject) -> Iterator[Finding]:
    """FSDP2 and tied embeddings (`--model`) with torch 2.13 or newer before accelerate 1.15.

    torch refuses a parameter that two units share: "Parameter is shared with a parameter already managed".
    """
    tied = subject.model is not None and subject.model.tied
    old = older(subject, "accelerate", "1.15") and not older(subject, "torch", "2.13") and "torch" in subject.versions
    if subject.engine is Engine.FSDP2 and tied and old:
        yield Finding(
            "fsdp_config.fsdp_version",
            "this accelerate puts tied embeddings into two units, which this torch refuses",
            "prepare stops: the parameter is shared",
            "pip install 'accelerate>=1.15'",
        )


@rule("AF704", fixed_in="accelerate 1.13", pains=("P95",))
def optimizer_does_not_resume(subject: Subject) -> Iterator[Finding]:
    """Resuming under FSDP2 before accelerate 1.13: "Missing key in checkpoint state_dict: optimizer.state.0.step"."""
    if subject.engine is Engine.FSDP2 and subject.resumes and older(subject, "accelerate", "1.13"):
        yield Finding(
            "fsdp_config.fsdp_version",
            "this accelerate can't load FSDP2's optimizer state",
            "resuming stops: Missing key in checkpoint state_dict",
            "pip install 'accelerate>=1.15'",
        )


@rule("AF705", "warning", fixed_in="accelerate 1.14", pains=("P96",))
def no_float32_masters(subject: Subject) -> Iterator[Finding]:
    """Mixed precision under FSDP2 with accelerate 1.13.0, where the cast of 16-bit weights to float32 does nothing.

    Silent where the weights (`--model`, `--args`) are not known to load in 16 bits.
    """
    low = subject.load_dtype in LOW_DTYPES
    if subject.engine is Engine.FSDP2 and subject.mixed and low and subject.versions.get("accelerate") == "1.13.0":
        yield Finding(
            "mixed_precision",
            "accelerate 1.13.0 makes no float32 master weights",
            "weights, gradients and moments stay in 16 bits, and small updates are lost",
            "pip install 'accelerate>=1.15'",
        )


@rule("AF706", fixed_in="accelerate 1.13", pains=("P97",))
def offload_with_ram_loading(subject: Subject) -> Iterator[Finding]:
    """CPU offload and `fsdp_cpu_ram_efficient_loading` under FSDP2 before accelerate 1.13: the forward pass fails."""
    both = subject.on("fsdp_offload_params") and subject.on("fsdp_cpu_ram_efficient_loading")
    if subject.engine is Engine.FSDP2 and both and older(subject, "accelerate", "1.13"):
        yield Finding(
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "this accelerate leaves the loaded shards on the GPU",
            "offload expects them in host memory and the first forward fails",
            "pip install 'accelerate>=1.15', or fsdp_cpu_ram_efficient_loading: false",
        )
