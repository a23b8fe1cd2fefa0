"""Builds and loads the reference model, a stock `Qwen3ForCausalLM` of 1.4 million parameters.

Larger sizes are kept as folders, which transformers loads. The initialisation plants an induction circuit
(`plant_induction`), so that key matching forms within a minute of CPU time instead of a day.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from retain.reference.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, load_tokenizer

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

WEIGHTS = Path(__file__).parent / "weights"
SEEDS = (0, 1, 2)
EMBEDDING_STD = 0.3


def config(**changes: Any) -> Any:
    """The `Qwen3Config` of the reference model; `changes` make smaller ones for tests."""
    from transformers import Qwen3Config

    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": False,
        "max_position_embeddings": 4096,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return Qwen3Config(**{**fields, **changes})


def weights_path(seed: int) -> Path:
    """Where the weights of one training seed lie."""
    return WEIGHTS / f"seed{seed}.safetensors"


def load_model(seed: int = 0, *, path: Path | None = None) -> Qwen3ForCausalLM:
    """The trained reference model of one seed, float32, in eval mode.

    Args:
        seed: Of its training.
        path: Weights elsewhere than in the package.

    Raises:
        ValueError: There is no such seed.
    """
    from transformers import Qwen3ForCausalLM

    path = path or weights_path(seed)
    if not path.exists():
        have = ", ".join(str(s) for s in SEEDS if weights_path(s).exists()) or "none"
        raise ValueError(
            f"no reference model of seed {seed} at {path}: seeds {have} are there; "
            f"make it with `python -m retain.reference.train --seed {seed}`"
        )
    model = Qwen3ForCausalLM(config())
    try:
        state = {name: value.float() for name, value in load_file(path).items()}
        model.load_state_dict(state, strict=False)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} holds no weights of a reference model: {error}") from None
    model.tie_weights()
    missing = {name for name, _ in model.named_parameters()} - state.keys() - {"lm_head.weight"}
    if missing:
        raise ValueError(
            f"{path} lacks {sorted(missing)}: remake it with `python -m retain.reference.train --seed {seed}`"
        )
    return model.eval().requires_grad_(False)


def save_model(model: Qwen3ForCausalLM, path: Path) -> None:
    """Write bfloat16 safetensors: beside, then renamed, so that a full disk spares the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().clone().to(torch.bfloat16).contiguous()
        for name, value in model.named_parameters()
    }
    partial = path.with_suffix(".partial")
    save_file(state, partial, metadata={"format": "pt"})
    partial.replace(path)


def save_folder(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a model and its tokenizer as a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    The weights stay float32, so that the model is loaded as the shipped ones are. Their file is put there
    last: without it a folder that was written in part is no model.
    """
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    load_tokenizer().save_pretrained(partial)
    for path in sorted(partial.iterdir(), key=lambda path: path.suffix == ".safetensors"):
        path.replace(folder / path.name)
    partial.rmdir()


def load_folder(folder: str | Path) -> Any:
    """A model that `python -m retain.reference.train` wrote as a folder, in eval mode.

    Raises:
        ValueError: There is no model in it, or one of another vocabulary than the reference tasks'.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no model at {str(folder)!r}: make one with `python -m retain.reference.train --size large "
            f"--output {folder}`, or pass the folder of one"
        )
    # Looked at before weights are read, which another model may have many of.
    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'config.json'} is damaged: {error!r}") from None
    if known != VOCAB_SIZE:
        raise ValueError(
            f"the model at {str(folder)!r} knows {known} tokens, and the reference tasks are asked in the "
            f"reference tokenizer's {VOCAB_SIZE}: pass a model of `python -m retain.reference.train`, or "
            "take suite=text"
        )
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except Exception as error:  # a damaged folder leads transformers to errors of any class
        raise ValueError(
            f"the model at {str(folder)!r} cannot be loaded ({type(error).__name__}): {error}"
        ) from error
    return model.eval().requires_grad_(False)


def build(seed: int, *, planted: bool = True, **changes: Any) -> Qwen3ForCausalLM:
    """An untrained reference model; `planted` with `plant_induction`, `changes` are fields of its config."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config(**changes))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = EMBEDDING_STD if "embed_tokens" in name else parameter.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std *= 0.5
            torch.nn.init.normal_(parameter, std=std)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        elif name.endswith("q_norm.weight"):
            torch.nn.init.constant_(parameter, 1.5)
    # A wide embedding keeps token identity visible in the residual stream; a small last norm keeps the first
    # logits small all the same.
    torch.nn.init.constant_(model.model.norm.weight, 0.1 / EMBEDDING_STD)
    model.tie_weights()
    if planted:
        plant_induction(model)
    return model


def _orthonormal(rows: int, columns: int) -> Tensor:
    """`[rows, columns]` with orthonormal columns (rows >= columns)."""
    return torch.linalg.qr(torch.randn(rows, columns))[0]


@torch.no_grad()
def plant_induction(model: Qwen3ForCausalLM, strength: float = 8.0) -> None:
    """Plant a previous-token head in the first layer and matching heads in the next two.

    Layer 0, KV head 0: keys carry a constant, so that through RoPE query head `j` attends to the token `j +
    1` back; it copies that token into a subspace of its own (`one_back`, `two_back`). Layers 1 and 2: KV head
    0 matches entries by the token before them (statements like `set K V`), KV head 1 by the token two before
    (`K -> V`), against the query's own token and against the token before the query (so that `<a>` looks up
    the key before it); both copy the matched token: an induction circuit (Olsson et al., arXiv 2209.11895)
    for two distances. Last layer, KV head 0: finds the token before the query and reads what stood before it
    there, the same circuit backwards (a value's key).
    """
    c = model.config
    width, head, half = c.hidden_size, c.head_dim, c.head_dim // 2
    group = c.num_attention_heads // c.num_key_value_heads
    # Rows of a KV head, and of the query heads of one.
    rows = [slice(i * head, (i + 1) * head) for i in range(c.num_attention_heads)]
    first = model.model.layers[0].self_attn
    inverse_frequency = 1.0 / (1e6 ** (torch.arange(0, head, 2).float() / head))
    read = _orthonormal(width, head).T
    writes = [_orthonormal(width, head) for _ in range(group)]
    first.k_proj.weight[:head] *= 0.1
    first.q_proj.weight[: group * head] *= 0.1
    for i in range(4):
        first.k_proj.bias[i] = strength
        for j in range(group):
            angle = -float(inverse_frequency[i]) * (j + 1)
            first.q_proj.bias[j * head + i] = strength * math.cos(angle)
            first.q_proj.bias[j * head + i + half] = strength * math.sin(angle)
    first.v_proj.weight[:head] = read
    for j in range(group):
        first.o_proj.weight[:, rows[j]] = writes[j] * 0.5
    one_back, two_back = writes[0].T, writes[min(1, group - 1)].T
    for layer in model.model.layers[1:3]:
        attention = layer.self_attn
        for kv_head, context in enumerate((one_back, two_back)[: c.num_key_value_heads]):
            rotation = _orthonormal(head, head)
            attention.k_proj.weight[rows[kv_head]] = rotation @ context
            heads = rows[kv_head * group : (kv_head + 1) * group]
            for own, query in zip(heads, (read, one_back), strict=False):
                attention.q_proj.weight[own] = rotation @ query
            copied = _orthonormal(width, head)
            attention.v_proj.weight[rows[kv_head]] = copied.T
            for own in heads:
                attention.o_proj.weight[:, own] = copied * 0.5
    last = model.model.layers[-1].self_attn
    rotation = _orthonormal(head, head)
    last.k_proj.weight[:head] = rotation @ read
    last.v_proj.weight[:head] = (one_back + two_back) / math.sqrt(2)
    for own in rows[:group]:
        last.q_proj.weight[own] = rotation @ one_back
        last.o_proj.weight[:, own] = read.T * 0.25
