"""Makes an ordinary folder of transformers of a GGUF file: `python -m retain.models.convert FILE FOLDER`.

A separate process, since what transformers reads a GGUF file into it refuses to save: the weights are
copied into a model of the same config, without its quantisation. They are bfloat16, as the models were
published before their quantisation; `dtype="auto"` makes them float32 on a CPU that does not compute in it.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(file: Path, folder: Path) -> None:
    """Writes model and tokenizer of a GGUF file into a folder."""
    where = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    settings = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        settings.pop(name, None)
    model = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16)
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
