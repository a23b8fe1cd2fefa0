"""Answers: greedy, and cut at their end."""

import torch
from transformers import GenerationConfig

from retain.eval.run.answers import cut, respond
from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from tests.tiny import VOCAB, tiny_model

PENALTIES = {
    **{"repetition_penalty": 1.5, "suppress_tokens": [*range(50)], "no_repeat_ngram_size": 1},
    **{"do_sample": True, "temperature": 3.0, "num_beams": 3, "max_new_tokens": 2},
}


def test_answers_are_greedy_whatever_the_checkpoint_says(monkeypatch):
    assert (cut([5, 7, 9, 7], (9, 7)), cut([5, 7], ()), cut([9], (9,))) == ((5,), (5, 7), ())
    model = tiny_model("qwen3")
    attach(model)
    ids = torch.randint(2, VOCAB, (2, 60), generator=torch.manual_seed(0))

    def answers(**more):
        return respond(model, Cache(model, policy=None), ids, new_tokens=8, **more)

    plain, ending = answers(), answers(end_ids=range(0, VOCAB, 3))
    assert len({*plain, *ending}) > 2 and {len(one) for one in plain} == {8} != {len(one) for one in ending}
    with torch.no_grad():
        logits = model(torch.cat([ids[:1], torch.tensor([plain[0]])], dim=1)).logits[0, 59:-1]
    assert tuple(logits.argmax(-1).tolist()) == plain[0]
    stated = GenerationConfig(**PENALTIES, eos_token_id=plain[0][0])
    monkeypatch.setattr(model, "generation_config", stated)
    assert (answers(), answers(end_ids=range(0, VOCAB, 3))) == (plain, ending)
    assert model.generation_config is stated
