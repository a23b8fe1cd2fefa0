"""Answers: greedy, and cut at their end; contexts are read together where they can be."""

from dataclasses import replace

import pytest
import torch
from transformers import GenerationConfig

from retain.eval.run.answers import cut, padded, respond
from retain.eval.run.plan import Context, Unit, naming, units_of
from retain.eval.tasks.encode import Encoded
from retain.eval.tasks.row import Row
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from tests.eval.small import small
from tests.tiny import VOCAB, tiny_model


def context(item: int, tokens: int = 9, question: int = 3, ends: tuple[int, ...] = ()) -> Context:
    encoded = Encoded((5,) * tokens, (6,) * question, (7, 8, 9), ends)
    return Context((Row("t", "c", "q", ("a",), 3, item=item),), (encoded,))


def test_contexts_are_read_together_where_their_tails_are_alike(tmp_path):
    def units(when, *contexts):
        config = small(tmp_path, when=(when,), batch_items=8)
        return [[row.item for row in unit.rows] for unit in units_of(config, contexts)]

    lengths = [context(0), context(1, tokens=7), context(2)]
    assert units("prefill", *lengths) == units("decode", *lengths) == [[0, 1, 2]]
    assert units("chunk", *lengths) == [[0, 2], [1]]  # padding would move chunk borders
    ending = [context(0, ends=(3,)), context(1, ends=(3,))]
    assert (units("prefill", *ending), units("decode", *ending)) == ([[0, 1]], [[0], [1]])
    assert units("prefill", context(0), context(1, question=4), context(2)) == [[0, 2], [1]]
    assert [unit.when for unit in units_of(small(tmp_path, when=("decode", "prefill")), lengths)] == [
        "decode",
        "prefill",
    ]
    ids, mask = padded([(1, 2, 3), (4,)])
    assert (ids.tolist(), mask.tolist()) == ([[1, 2, 3], [0, 0, 4]], [[1, 1, 1], [0, 0, 1]])


def test_generation_reads_all_of_a_right_answer_but_its_last_token():
    assert context(0).read_back(0) == (7, 8)
    longer = replace(context(0).encoded[0], answer_ids=(5, 6, 7, 8))
    assert Context(context(0).rows, (longer,)).read_back(0) == (5, 6)


PENALTIES = {
    **{"repetition_penalty": 1.5, "suppress_tokens": [*range(50)], "no_repeat_ngram_size": 1},
    **{"do_sample": True, "temperature": 3.0, "num_beams": 3, "max_new_tokens": 2},
}


def test_answers_are_greedy_whatever_the_checkpoint_says(monkeypatch):
    assert (cut([5, 7, 9, 7], (9, 7)), cut([5, 7], ()), cut([9], (9,))) == ((5,), (5, 7), ())
    model = attach(tiny_model("qwen3")).model
    ids, mask = padded(torch.randint(2, VOCAB, (2, 60), generator=torch.manual_seed(0)).tolist())

    def answers(**more):
        return respond(model, Cache(model, policy=None), ids, mask, new_tokens=8, **more)

    plain, ending = answers(), answers(end_ids=range(0, VOCAB, 3))
    assert len({*plain, *ending}) > 2 and {len(one) for one in plain} == {8} != {len(one) for one in ending}
    with torch.no_grad():
        logits = model(torch.cat([ids[:1], torch.tensor([plain[0]])], dim=1)).logits[0, 59:-1]
    assert tuple(logits.argmax(-1).tolist()) == plain[0]
    stated = GenerationConfig(**PENALTIES, eos_token_id=plain[0][0])
    monkeypatch.setattr(model, "generation_config", stated)
    assert (answers(), answers(end_ids=range(0, VOCAB, 3))) == (plain, ending)
    assert model.generation_config is stated


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            ValueError,
            "out of memory in items 0 to 1 of t",
        ),
        (MemoryError(), ValueError, r"out of memory in .*\(seed 0, decode\), snapkv: nothing of it was"),
        (ValueError("too few"), ValueError, r"in items 0 to 1 of t \(seed 0, decode\), snapkv: too few"),
        (KeyError("k"), RuntimeError, "snapkv: KeyError: 'k'"),
    ],
)
def test_an_error_names_its_unit_and_is_no_score(raised, kind, says):
    with pytest.raises(kind, match=says), naming(Unit("decode", (context(0), context(1))), "snapkv"):
        raise raised
