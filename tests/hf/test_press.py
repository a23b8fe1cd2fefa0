"""Presses written here, in the other library's calling convention, against our own scores."""

import pytest
import torch

from retain.hf.intercept.observe import observe
from retain.hf.intercept.press import press_score
from retain.hf.model.decoder import describe
from retain.scores import SCORES
from tests.close import MODEL, assert_close
from tests.refused import refused
from tests.tiny import PLAIN, tiny_batch, tiny_model

PADS, TOKENS = (0, 3, 11), 40


class NormPress:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class Remembers:
    """Keeps what it was called with."""

    def __init__(self):
        self.calls = []

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        embedding = getattr(module, "rotary_emb", None)
        self.calls.append((module, hidden_states, keys, values, attentions, kwargs, embedding))
        return keys[..., 0]


def _observed(family):
    model = tiny_model(family)
    return model, observe(model, *tiny_batch(PADS, TOKENS))


@pytest.mark.parametrize("family", PLAIN)
def test_a_press_is_its_score_of_ours(family):
    model, layers = _observed(family)
    score = press_score(model, NormPress())
    for evidence in layers:
        ours, got = SCORES["knorm"].function(evidence), score(evidence)
        assert score.__name__ == "NormPress" and got.unit == ours.unit
        assert_close(got.values_BHT, ours.values_BHT, ops=MODEL)


def test_a_press_sees_one_sequence_without_its_padding():
    model, layers = _observed("qwen3")
    press = Remembers()
    score = press_score(model, press)
    spec = describe(model)[1]
    state = [set(vars(module)) for module in model.modules()]
    modules = dict(model.named_modules())
    got = score(layers[1])
    assert torch.equal(torch.isneginf(got.values_BHT), ~layers[1].valid_BT[:, None].expand_as(got.values_BHT))
    assert len(press.calls) == 3
    for row, call in enumerate(press.calls):
        module, hidden, keys, values, attentions, kwargs, embedding = call
        real = slice(PADS[row], None)
        n = TOKENS - PADS[row]
        assert module is spec.module and attentions is None and embedding is model.model.rotary_emb
        assert torch.equal(hidden, layers[1].hidden_BTE[row : row + 1, real])
        assert torch.equal(keys, layers[1].keys_BHTD[row : row + 1, :, real])
        assert torch.equal(values, layers[1].values_BHTD[row : row + 1, :, real])
        assert torch.equal(got.values_BHT[row, :, real], keys[0, ..., 0])
        assert torch.equal(kwargs["hidden_states"], hidden)
        assert torch.equal(kwargs["cache_position"], torch.arange(n))
        assert torch.equal(kwargs["position_ids"], torch.arange(n)[None])
        want = model.model.rotary_emb(hidden, torch.arange(n)[None])
        assert all(torch.equal(a, b) for a, b in zip(kwargs["position_embeddings"], want, strict=True))
    assert [set(vars(module)) for module in model.modules()] == state
    assert dict(model.named_modules()) == modules and not hasattr(spec.module, "rotary_emb")


class Returns:
    """A press that returns what a function makes of the keys."""

    def __init__(self, value):
        self.value = value

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.value(keys)


def test_what_is_no_press_is_refused():
    model, layers = _observed("llama")
    refused("object has no `score` method: pass an object", press_score, model, object())
    refused("unit .*'percent'", press_score, model, NormPress(), unit="percent")
    shape = r"Returns.score returned \[1, 2, 8\], maybe with NaN, for layer 1; wanted .*\[1, 2, 40\]"
    refused(shape, press_score(model, Returns(lambda keys: keys[:, :, 0])), layers[1])
    with pytest.raises(ZeroDivisionError):
        press_score(model, Returns(lambda keys: 1 / 0))(layers[0])
    assert not hasattr(describe(model)[0].module, "rotary_emb")
    broken = Returns(lambda keys: keys[..., 0].index_fill(2, torch.tensor(7), torch.nan))
    refused(r"returned \[1, 2, 40\], maybe with NaN, for layer 1", press_score(model, broken), layers[1])
