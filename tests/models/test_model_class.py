"""Which class of transformers a config means: the one that `architectures` names, whatever Auto class knows it too."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from accel_fsdp import models
from accel_fsdp.errors import UserError

NESTED = {
    "MllamaForConditionalGeneration": "two parts, of which AutoModelForCausalLM builds one",
    "Llama4ForConditionalGeneration": "its language part is a model with a head",
    "Qwen3_5MoeForConditionalGeneration": "experts in the language part",
    "Qwen2_5_VLForConditionalGeneration": "no class for its language part alone",
    "Blip2ForConditionalGeneration": "three stacks, and classes of attention within layers",
    "MBartForConditionalGeneration": "encoder and decoder, and classes of attention within layers",
    "WhisperForConditionalGeneration": "encoder and decoder, in no Auto class for text",
    "Qwen2_5OmniForConditionalGeneration": "models within the model, and whole encoders among its layer classes",
    "CsmForConditionalGeneration": "a class that AutoModel builds",
    "MusicgenForConditionalGeneration": "two parts that read text",
    "Dots3NoteForConditionalGeneration": "heads whose number differs between layers",
}


def written(name: str, folder: Path, named: bool = True) -> Path:
    """The folder of a class's default config."""
    config = getattr(transformers, name).config_class()
    config.architectures = [name] if named else None
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", NESTED)
def test_layer_classes_and_parameters_are_those_of_the_class_that_the_config_names(name: str, tmp_path: Path) -> None:
    facts = models.read_model(str(written(name, tmp_path)))
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class())
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.classes == {type(module).__name__ for module in model.modules()}
    layers = {layer.name for layer in facts.wrap_classes}
    held = [path for path, module in model.named_modules() if type(module).__name__ in layers]
    assert not any(path.startswith(f"{outer}.") for path in held for outer in held)
    declared = {module for module in model._no_split_modules if module in facts.classes}
    assert layers <= declared
    within = tuple(path for path, module in model.named_modules() if type(module).__name__ in declared)
    assert all(
        path.startswith(tuple(held)) or any(element.startswith(f"{path}.") for element in held) for path in within
    )


@pytest.mark.parametrize("name", ["MllamaForConditionalGeneration", "Qwen3_5ForConditionalGeneration"])
def test_a_config_that_names_no_class_means_the_one_for_all_its_parts(name: str, tmp_path: Path) -> None:
    named, plain = (
        models.read_model(str(written(name, tmp_path / str(given), named=given))) for given in (True, False)
    )
    assert (plain.parameters, plain.wrap_classes) == (named.parameters, named.wrap_classes)


@pytest.mark.parametrize(
    ("name", "parameters", "of_language"),
    [("MllamaForCausalLM", 9_775_192_080, 0), ("MllamaForConditionalGeneration", 10_642_941_475, 9_775_192_080)],
)
def test_the_language_part_is_built_if_named(name: str, parameters: int, of_language: int, tmp_path: Path) -> None:
    transformers.MllamaConfig(architectures=[name]).save_pretrained(tmp_path)
    facts = models.read_model(str(tmp_path))
    assert (facts.parameters, facts.language_parameters) == (parameters, of_language)


@pytest.mark.parametrize("architectures", [["NoSuchModel"], ["AutoModel"], ["BertModel"], ["LlamaForCausalLM"], "Bert"])
def test_names_of_no_class_that_is_trained_leave_it_to_the_auto_classes(architectures: object, tmp_path: Path) -> None:
    settings = {"model_type": "bert", "architectures": architectures, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    facts = models.read_model(str(tmp_path))
    assert facts.auto_class == "AutoModelForMaskedLM"
    assert "BertLayer" in {layer.name for layer in facts.wrap_classes}


def test_a_package_that_a_class_needs_is_not_blamed_on_the_config(tmp_path: Path) -> None:
    """transformers builds its image encoders from timm, which nothing here needs."""
    with pytest.raises(UserError, match=r"needs a package that is not installed: .*timm"):
        models.read_model(str(written("FastVlmForConditionalGeneration", tmp_path)))
