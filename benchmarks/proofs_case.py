"""The plain `Trainer` of `proofs.py`, as its documentation shows it: a tokenized text in each row."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Arguments:
    """What Trainer has no arguments for."""

    model_name_or_path: str
    dataset_name: str
    max_length: int = 64
    dtype: str = "float32"
    packing: bool = False


@dataclass
class Adapter:
    """As TRL and train/sft.py name them."""

    use_peft: bool = False
    use_dora: bool = False
    lora_r: int = 4
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | None = None
    lora_modules_to_save: list[str] | None = None


def adapted(model: Any, adapter: Adapter) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapter.lora_r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        use_dora=adapter.use_dora,
        target_modules=adapter.lora_target_modules,
        modules_to_save=adapter.lora_modules_to_save,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def main() -> None:
    parser = HfArgumentParser((Arguments, Adapter, TrainingArguments))  # type: ignore[arg-type]
    arguments, adapter, training = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path, trust_remote_code=False)
    rows = load_dataset(arguments.dataset_name, split="train").map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=arguments.max_length), remove_columns="text"
    )
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model_name_or_path, dtype=getattr(torch, arguments.dtype), trust_remote_code=False
    )
    if adapter.use_peft:
        model = adapted(model, adapter)
    collator = (
        DataCollatorWithFlattening() if arguments.packing else DataCollatorForLanguageModeling(tokenizer, mlm=False)
    )
    Trainer(model, training, train_dataset=rows, data_collator=collator).train()


if __name__ == "__main__":
    main()
