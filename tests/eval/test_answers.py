"""Answers: greedy, cut at their end, and read together where they can be."""

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from retain.eval.run.answers import Answer, alike, cut, padded, read_back, respond
from retain.eval.run.evaluated_model import Unit, naming
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from tests.eval.stub import stub_item
from tests.tiny import VOCAB, tiny_model


def places(groups):
    return [[*group] for group in groups]


def test_items_are_read_together_where_their_tails_are_alike():
    items = {index: stub_item("ragged", 0, index, 100) for index in range(4)}
    assert places(alike(items)) == [[0, 1, 2, 3]]
    assert places(alike(items, chunked=True)) == [[0, 3], [1], [2]]  # padding would move chunk borders
    ending = {index: replace(item, end_ids=(3,)) for index, item in items.items()}
    assert places(alike(ending)) == [[0, 1, 2, 3]] and places(alike(ending, alone=True)) == [
        [0],
        [1],
        [2],
        [3],
    ]
    items[1] = stub_item("odd", 0, 1, 100)
    items[7] = ending[0]
    assert places(alike(items, alone=True)) == [[0, 2, 3], [1], [7]]
    ids, mask = padded([(1, 2, 3), (4,)])
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])


def test_later_questions_are_read_with_their_own_answers():
    item = stub_item("turns", 0, 0, 100)
    longer = replace(item.asked[1], gold_ids=(5, 6, 7, 8), generate=4)
    assert read_back(replace(item, asked=(item.asked[0], longer)), 1) == (5, 6, 7)
    assert read_back(item) == item.gold_ids[:1]
    # What is read of them must be equally long where items are read together.
    short = replace(longer, gold_ids=(5,))
    items = {i: replace(item, asked=(item.asked[0], own)) for i, own in enumerate((longer, short))}
    assert places(alike(items)) == [[0], [1]]


def test_an_answer_is_what_comes_before_the_first_end():
    assert cut([5, 7, 9, 7], (9, 7)) == Answer((5,), 7)
    assert cut([5, 7], ()) == Answer((5, 7)) and cut([9], (9,)) == Answer((), 9)
    assert [Answer((1, 2), end).generated for end in (None, 9)] == [(1, 2), (1, 2, 9)]


PENALTIES = {
    **{"repetition_penalty": 1.5, "suppress_tokens": [*range(50)], "no_repeat_ngram_size": 1},
    **{"do_sample": True, "temperature": 3.0, "num_beams": 3, "max_new_tokens": 2},
}


def test_answers_are_greedy_whatever_the_checkpoint_says(monkeypatch):
    model = attach(tiny_model("qwen3")).model
    ids, mask = padded([stub_item("copy", 0, index, 100).context_ids for index in range(2)])

    def answers(**more):
        return respond(model, Cache(model, policy=None), ids, mask, new_tokens=8, **more)

    plain, ending = answers(), answers(end_ids=range(0, VOCAB, 3))
    assert len({answer.tokens for answer in (*plain, *ending)}) > 2 and any(one.ended for one in ending)
    with torch.no_grad():
        logits = model(torch.cat([ids[:1], torch.tensor([plain[0].tokens])], dim=1)).logits[0, 99:-1]
    assert tuple(logits.argmax(-1).tolist()) == plain[0].tokens
    own = GenerationConfig(**PENALTIES, eos_token_id=plain[0].tokens[0])
    monkeypatch.setattr(model, "generation_config", own)
    assert (answers(), answers(end_ids=range(0, VOCAB, 3))) == (plain, ending)
    assert model.generation_config is own

    def fail(*_, **__):
        raise KeyError("stopped")

    with pytest.raises(KeyError, match="stopped"):
        answers(watch=fail)
    assert model.generation_config is own


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), ValueError, "out of memory in seed0/copy/0-2"),
        (MemoryError(), ValueError, "out of memory in seed0/copy/0-2, decode at 0.2: nothing of it was"),
        (ValueError("too few"), ValueError, "in seed0/copy/0-2, decode at 0.2: too few"),
        (KeyError("k"), RuntimeError, "in seed0/copy/0-2, decode at 0.2: KeyError: 'k'"),
    ],
)
def test_what_goes_wrong_names_its_cell_and_is_no_score(raised, kind, says):
    with pytest.raises(kind, match=says), naming(Unit(0, "copy", 0, 2), "decode at 0.2"):
        raise raised
