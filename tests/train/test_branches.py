"""What is read after a document: the appendix, repetitions, and the model's own continuation."""

import pytest
import torch

from retain.train import branches as module
from retain.train.branches import Branch, continue_greedily, readings_of, row_tokens
from retain.train.data import Document
from retain.train.targets import TargetSettings
from retain.train.teacher import Frozen
from tests.tiny import tiny_model


def draw(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def encode(text: str, special: bool) -> list[int]:
    """One token a word; special tokens are never asked for here."""
    assert not special
    return [50 + len(word) for word in text.split()]


DOCUMENTS = [Document(draw(25, 0), draw(4, 1)), Document(draw(9, 2)), Document(draw(17, 3), draw(2, 4))]


def settings(*sources: str, **changes: int | str) -> TargetSettings:
    return TargetSettings(sources=dict.fromkeys(sources, 1.0), **changes)  # type: ignore[arg-type]


def greedy(
    model: torch.nn.Module, ids: tuple[int, ...], tokens: int, ends: tuple[int, ...]
) -> tuple[int, ...]:
    """One token at a time, each from a forward of its own."""
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
    assert [reading.key for reading in readings] == [document.key for document in DOCUMENTS]
    assert [reading.num_tokens for reading in readings] == [29, 9, 19]
    assert all(not reading.branches for reading in readings_of(DOCUMENTS, settings("own"), frozen))


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


def test_without_a_tokenizer_there_is_no_prompt() -> None:
    given = settings("repeat", repeat_chunk=20)
    first, _, _ = readings_of(DOCUMENTS, given, Frozen(tiny_model(), None, 0))
    ids = DOCUMENTS[0].context_ids
    assert [branch.ids for branch in first.branches] == [ids[:20], ids[12:20] + ids[20:]]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_next"])
def test_a_continuation_is_what_the_model_writes_greedily(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In padded batches, and as each document would be continued alone."""
    monkeypatch.setattr(module, "AT_ONCE", 2)
    model = tiny_model(family, dtype=torch.float64)
    frozen = Frozen(model, None, 0)
    wanted = [greedy(model, document.context_ids, 6, ()) for document in DOCUMENTS]
    assert continue_greedily(frozen, DOCUMENTS, 6) == wanted
    readings = readings_of(DOCUMENTS, settings("continuation", continuation_tokens=6), frozen)
    assert [reading.branches for reading in readings] == [(Branch("continuation", ids),) for ids in wanted]
    assert model.generation_config.max_new_tokens is None, "nothing is left on the model"


def test_a_continuation_ends_where_the_model_ends() -> None:
    model = tiny_model("qwen3", dtype=torch.float64)
    whole = continue_greedily(Frozen(model, None, 0), DOCUMENTS, 8)
    end = whole[0][3]
    model.generation_config.eos_token_id = [end, 1]
    wanted = [greedy(model, document.context_ids, 8, (end, 1)) for document in DOCUMENTS]
    frozen = Frozen(model, None, 0)
    assert continue_greedily(frozen, DOCUMENTS, 8) == wanted
    assert len(wanted[0]) <= 3 and any(len(ids) == 8 for ids in whole)
    model.generation_config.eos_token_id = whole[1][0]
    (nothing,) = continue_greedily(Frozen(model, None, 0), DOCUMENTS[1:2], 8)
    assert nothing == ()


def test_continuations_are_remembered() -> None:
    model = tiny_model("qwen3")
    frozen = Frozen(model, None, 0)
    calls: list[int] = []
    generate = model.generate

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        return generate(*args, **kwargs)

    model.generate = counted
    first = continue_greedily(frozen, DOCUMENTS, 4)
    assert continue_greedily(frozen, [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[2]], 4) == [
        first[2],
        first[0],
        first[2],
    ]
    assert len(calls) == 1
    continue_greedily(frozen, DOCUMENTS[:1], 5)
    assert len(calls) == 2, "of another length it is another one"


def test_a_document_without_any_source_is_refused() -> None:
    frozen = Frozen(tiny_model(), None, 0)
    with pytest.raises(
        ValueError, match=r"target.sources=\[appendix\] needs something .* document 1 has nothing"
    ):
        readings_of(DOCUMENTS, settings("appendix"), frozen)
    readings_of(DOCUMENTS, settings("appendix", "repeat"), frozen)


def test_branches_beyond_the_models_length_are_refused() -> None:
    frozen = Frozen(tiny_model(max_position_embeddings=40), None, 0)
    readings_of(DOCUMENTS, settings("repeat", repeat_chunk=5), frozen)
    with pytest.raises(
        ValueError, match="document 0 has 25 tokens, 50 with its repeat, and the model takes 40"
    ):
        readings_of(DOCUMENTS, settings("repeat"), frozen)


@pytest.mark.parametrize(
    "sources", [("own",), ("appendix", "own"), ("repeat",), ("own", "repeat", "continuation")]
)
def test_a_row_is_no_longer_than_is_planned_for(sources: tuple[str, ...]) -> None:
    given = settings(*sources, repeat_chunk=10, continuation_tokens=5)
    for reading in readings_of(DOCUMENTS, given, Frozen(tiny_model(), encode, 0)):
        assert reading.num_tokens <= row_tokens(reading.document, given)
