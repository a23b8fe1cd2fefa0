"""Small documents, models and gates of training tests."""

from collections.abc import Sequence
from typing import Any

import torch

from retain.gates import GateSet, build_gates
from retain.hf.model.decoder import describe
from retain.train.data.document import Document
from retain.train.stage import HELD_OUT_STEP, Stage
from retain.train.teacher import Frozen
from tests.tiny import PAD, VOCAB, tiny_model


def encode_letters(text: str, special: bool) -> list[int]:
    """A token a letter, after a special one."""
    return [1] * special + [ord(letter) for letter in text]


def draw_ids(length: int, seed: int = 0, first: int = 2, last: int = VOCAB) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(first, last, (length,), generator=generator).tolist())


def document(length: int, appendix: int = 0, seed: int = 0) -> Document:
    ids = draw_ids(length + appendix, seed)
    return Document(ids[:length], ids[length:])


def frozen_of(family: str = "qwen3", **settings: Any) -> Frozen:
    return Frozen(tiny_model(family, **settings), None, PAD)


def sizes_of(model: Any, **settings: Any) -> dict[int, dict[str, int]]:
    """Dimensions of each evicting layer's gate."""
    return {
        spec.layer_idx: {"E": spec.hidden_size, "H": spec.num_kv_heads, **settings}
        for spec in describe(model)
    }


def look(objective: Stage, documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Numbers of held-out documents."""
    with torch.no_grad():
        return objective.rows_of(documents, HELD_OUT_STEP, None)


def gates_for(model: Any, family: str = "linear", **settings: Any) -> GateSet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_gates(family, sizes_of(model, **settings))
