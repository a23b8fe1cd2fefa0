"""Texts that are read after a document: the appendix, repetitions, and the model's own continuation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from retain.train.data import branches as module
from retain.train.data.branches import continuation_of, readings_of, row_tokens
from retain.train.data.document import Branch, Document
from retain.train.objectives.targets import TargetSettings
from retain.train.recipe import document_check
from retain.train.teacher import Frozen
from tests.memory import Watch
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train.made import draw_ids


def encode(text: str, special: bool) -> list[int]:
    """A token a word; special tokens are never asked for here."""
    assert not special
    return [50 + len(word) for word in text.split()]


DOCUMENTS = [
    Document(draw_ids(25, 0), draw_ids(4, 1)),
    Document(draw_ids(9, 2)),
    Document(draw_ids(17, 3), draw_ids(2, 4)),
]


def settings(*sources: str, **changes: int | str) -> TargetSettings:
    return TargetSettings(sources=dict.fromkeys(sources, 1.0), **changes)  # type: ignore[arg-type]


def greedy(
    model: torch.nn.Module, ids: tuple[int, ...], tokens: int, ends: tuple[int, ...]
) -> tuple[int, ...]:
    """A token at a time, each from a forward of its own."""
    written = list(ids)
    for _ in range(tokens):
        with torch.no_grad():
            token = int(model(torch.tensor([written]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        written.append(token)
    return tuple(written[len(ids) :])


def test_an_appendix_is_a_branch_where_there_is_one() -> None:
    frozen = Frozen(tiny_model(), None, 0)
    readings = readings_of(DOCUMENTS, settings("own", "appendix"), frozen)
    assert [reading.branches for reading in readings] == [
        (Branch("appendix", DOCUMENTS[0].appendix_ids),),
        (),
        (Branch("appendix", DOCUMENTS[2].appendix_ids),),
    ]
    assert [reading.document.key for reading in readings] == [document.key for document in DOCUMENTS]
    asked = settings("own", "appendix")
    assert [row_tokens(document, asked) for document in DOCUMENTS] == [29, 9, 19]
    read = settings("repeat", "continuation", repeat_chunk=10, continuation_tokens=5)
    assert row_tokens(DOCUMENTS[0], read) == 25 + (25 + 3 * (32 + 8)) + 5
    assert all(not reading.branches for reading in readings_of(DOCUMENTS, settings("own"), frozen))
    said = r"target.sources=\[appendix\] needs something .* document 1 has nothing"
    refused(said, readings_of, DOCUMENTS, settings("appendix"), frozen)


def test_a_repetition_is_asked_for_chunk_by_chunk() -> None:
    frozen = Frozen(tiny_model(), encode, 0)
    given = settings(
        "repeat", repeat_chunk=10, repeat_prompt="once more please", repeat_next_prompt="go on with"
    )
    first, second, _ = readings_of(DOCUMENTS, given, frozen)
    ids, prompt, after = DOCUMENTS[0].context_ids, (54, 54, 56), (52, 52, 54)
    assert [branch.ids for branch in first.branches] == [
        prompt + ids[:10],
        after + ids[2:10] + ids[10:20],
        after + ids[12:20] + ids[20:],
    ]
    assert {branch.source for branch in first.branches} == {"repeat"}
    assert [branch.ids for branch in second.branches] == [prompt + DOCUMENTS[1].context_ids]
    parts = [branch.ids for branch in first.branches]
    assert parts[0][3:] + parts[1][11:] + parts[2][11:] == ids, "all of it, once"
    alone, _, _ = readings_of(DOCUMENTS, settings("repeat", repeat_chunk=20), Frozen(tiny_model(), None, 0))
    assert [branch.ids for branch in alone.branches] == [ids[:20], ids[12:20] + ids[20:]], "no prompt"


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss", "qwen3_next"])
def test_a_continuation_is_what_the_model_writes_greedily(family: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    frozen = Frozen(model, None, 0)
    wanted = [greedy(model, document.context_ids, 6, ()) for document in DOCUMENTS]
    readings = readings_of(DOCUMENTS, settings("continuation", continuation_tokens=6), frozen)
    assert [reading.branches for reading in readings] == [(Branch("continuation", ids),) for ids in wanted]
    assert model.generation_config.max_new_tokens is None, "nothing is left on the model"


def continuations(frozen: Frozen, tokens: int) -> list[tuple[int, ...]]:
    return [continuation_of(frozen, document, tokens) for document in DOCUMENTS]


def test_a_continuation_ends_where_the_model_ends() -> None:
    model = tiny_model("qwen3", dtype=torch.float64)
    whole = continuations(Frozen(model, None, 0), 8)
    end = whole[0][3]
    model.generation_config.eos_token_id = [end, 1]
    wanted = [greedy(model, document.context_ids, 8, (end, 1)) for document in DOCUMENTS]
    assert continuations(Frozen(model, None, 0), 8) == wanted
    assert len(wanted[0]) <= 3 and any(len(ids) == 8 for ids in whole)
    model.generation_config.eos_token_id = whole[1][0]
    assert continuation_of(Frozen(model, None, 0), DOCUMENTS[1], 8) == ()


def test_memory_of_writing_is_linear() -> None:
    """No mask of all pairs, where transformers makes none (it does for sliding windows)."""
    model = tiny_model("llama", max_position_embeddings=16384)
    peaks = []
    for tokens in (1024, 2048, 4096, 8192):
        frozen = Frozen(model, None, 0)
        with Watch() as watch:
            continuation_of(frozen, Document(draw_ids(tokens, 0)), 2)
        peaks.append(watch.peak)
    slopes = [(peaks[place + 1] - peaks[place]) / 2**place for place in range(3)]
    assert max(slopes) <= 1.1 * min(slopes)
    assert peaks[3] < 8192 * 8192 / 2, "half a mask of all pairs"


def test_a_document_is_named_by_its_origin_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, make_config: Callable[..., Any]
) -> None:
    """Asked as documents are read: the longest branch counts, and a continuation as long as it may get."""
    monkeypatch.setattr(module, "_written", lambda *_, **__: pytest.fail("nothing may be written yet"))
    frozen = Frozen(tiny_model(max_position_embeddings=40), encode, 0)
    document = Document(draw_ids(25, 0), draw_ids(4, 1), origin="rows.jsonl line 7")
    sources = {"own": 1.0, "appendix": 1.0}
    for changes, message in (
        ({"repeat": 1.0}, "rows.jsonl line 7 has 25 tokens, 55 with its repeat, and the model takes 40"),
        ({"continuation": 1.0}, "rows.jsonl line 7 has 25 tokens, 45 with its continuation"),
    ):
        target = {"sources": sources | changes, "continuation_tokens": 20, "horizon": 8}
        refused(message, document_check(make_config(target=target), frozen), document)
    document_check(make_config(), frozen)(document)
