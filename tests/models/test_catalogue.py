"""The bundled models, and which of them a misspelt name means."""

import pytest

from accel_fsdp.models import catalogue


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("meta-llama/Llama-3.1-8", "meta-llama/Llama-3.1-8B"),
        ("Llama-2-7", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-3.1-8B", ""),  # it is that, and lacks something else
        ("none-of-them", ""),
    ],
)
def test_which_model_was_meant(name: str, meant: str) -> None:
    assert catalogue.near(name) == meant
