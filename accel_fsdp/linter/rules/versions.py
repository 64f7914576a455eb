"""Rules about the installed versions."""

from collections.abc import Iterator

from accel_fsdp.config import Engine
from accel_fsdp.linter.rules.engine import Finding, Subject, rule


@rule("AF702")
def sagemaker_is_not_launched(subject: Subject) -> Iterator[Finding]:
    """A file for SageMaker with accelerate 1.10 or later, whose launcher stops at every such file.

    It asks for the file's `parallelism_config`, which 1.10 added to files for a local machine only.
    """
    installed = subject.versions.get("accelerate")
    is_broken = installed is not None and not subject.older("accelerate", "1.10")
    if subject.values.get("compute_environment") == "AMAZON_SAGEMAKER" and is_broken:
        yield Finding(
            "compute_environment",
            f"accelerate {installed} launches no file for SageMaker",
            "it stops: 'SageMakerConfig' object has no attribute 'parallelism_config'",
            "pip install 'accelerate<1.10' where the job is submitted",
        )


@rule("AF701", "warning", pains=("P92", "P93", "P94", "P95", "P96", "P97"))
def accelerate_is_older(subject: Subject) -> Iterator[Finding]:
    """FSDP2 with accelerate before 1.15, which has bugs that depend on no key.

    Checkpoints keep rank 0's slice of an adapter, activation checkpointing wraps a layer's children (4 times the
    activations), and tied embeddings stop on torch 2.13. Version 1.13.0 makes no float32 master weights. Before 1.13
    the optimizer can't be resumed, and offload with `fsdp_cpu_ram_efficient_loading` fails.
    """
    if subject.engine is Engine.FSDP2 and subject.older("accelerate", "1.15"):
        yield Finding(
            "fsdp_config.fsdp_version",
            f"accelerate {subject.versions['accelerate']} has bugs under FSDP2 that 1.15 fixed",
            "adapters are lost, layers are checkpointed in parts, and tied embeddings or a resumed optimizer stop it",
            "pip install 'accelerate>=1.15'",
        )
