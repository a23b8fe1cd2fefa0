"""Answers: greedy, cut at their end, and read together where they can be."""

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from retain.eval.run.answers import Answer, Noise, alike, cut, padded, read_back, respond
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


def test_noise_makes_the_likeliest_token_one_that_is_sampled():
    """Of 4,000 sequences; four standard deviations."""
    logits, temperature, number = torch.tensor([1.0, 0.0, -1.0, 0.5]), 1.7, 4000
    noise = Noise(temperature, range(number), read=3)
    noisy = noise(torch.zeros(number, 5, dtype=torch.long), logits.expand(number, 4))
    share = noisy.argmax(-1).bincount(minlength=4) / number
    wanted = (logits / temperature).softmax(0)
    assert ((share - wanted).abs() < 4 * (wanted * (1 - wanted) / number).sqrt()).all()
    # The place in the answer counts, not what was read before it.
    places = [Noise(1.0, [7], read)(torch.zeros(1, 9, dtype=torch.long), logits[None]) for read in (2, 3, 3)]
    assert not torch.equal(places[0], places[1]) and torch.equal(places[1], places[2])


def test_sampled_answers_are_the_same_alone_and_in_any_batch():
    model = attach(tiny_model("qwen3")).model
    items = [stub_item("copy", 0, index, 100 - 20 * index).context_ids for index in range(3)]

    def answers(shown, seeds, temperature):
        ids, mask = padded([items[index] for index in shown])
        noise = Noise(temperature, seeds, ids.shape[1])
        cache = Cache(model, policy=None)
        return [one.tokens for one in respond(model, cache, ids, mask, new_tokens=8, noise=noise)]

    together = answers((0, 1, 2), (5, 6, 7), 2.0)
    assert together == [answers((index,), (5 + index,), 2.0)[0] for index in range(3)]
    assert answers((0, 0), (5, 8), 2.0)[0] == together[0] != answers((0, 0), (5, 8), 2.0)[1]
    ids, mask = padded(items)
    greedy = respond(model, Cache(model, policy=None), ids, mask, new_tokens=8)
    assert answers((0, 1, 2), (5, 6, 7), 1e-6) == [one.tokens for one in greedy]


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
