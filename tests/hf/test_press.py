"""Presses written here, in the other library's calling convention, against our own scores."""

import pytest
import torch

from retain.budget.ranking import rank_entries
from retain.hf.intercept.observe import observe
from retain.hf.intercept.press import press_score
from retain.hf.model.decoder import describe
from retain.scores import SCORES
from tests.close import MODEL, assert_close
from tests.refused import refused
from tests.tiny import PLAIN, tiny_batch, tiny_model

PADS, TOKENS, WINDOW = (0, 3, 11), 40, 8
every_family = pytest.mark.parametrize("family", PLAIN)


def _queries(module, hidden_states, cos, sin):
    """Queries after norm and RoPE, recomputed as such objects do, from what the attention module knows."""
    assert hidden_states.shape[0] == 1
    queries = module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim))
    if hasattr(module, "q_norm"):
        queries = module.q_norm(queries)
    queries = queries.transpose(1, 2)
    a, b = queries.chunk(2, dim=-1)
    return queries * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]


class WindowPress:
    """Mean attention of the last queries, smoothed: the SnapKV of a batch without padding."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        cos, sin = kwargs["position_embeddings"]
        last = slice(-WINDOW, None)
        queries = _queries(module, hidden_states[:, last], cos[:, last], sin[:, last])
        group = module.num_key_value_groups
        logits = queries @ keys.repeat_interleave(group, dim=1).mT * module.scaling
        hidden = torch.ones(WINDOW, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - WINDOW + 1)
        probs = logits.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
        mass = probs.mean(2)[..., :-WINDOW]
        mass = torch.nn.functional.avg_pool1d(mass, 5, stride=1, padding=2)
        mass = mass.unflatten(1, (-1, group)).mean(2)
        return torch.nn.functional.pad(mass, (0, WINDOW), value=float(mass.max()))


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


def _observed(family, **settings):
    model = tiny_model(family, **settings)
    return model, observe(model, *tiny_batch(PADS, TOKENS))


def _kept(score_BHT, valid_BT, ratio=0.4):
    budget_B = (valid_BT.sum(-1) * ratio).round()
    return rank_entries(score_BHT) < budget_B[:, None, None]


# A press, how its numbers are called, our score, and its settings.
TWINS = {
    "snapkv": (WindowPress, {"unit": "mass"}, {"window": WINDOW}),
    "knorm": (NormPress, {}, {}),
}


@every_family
@pytest.mark.parametrize("name", TWINS)
def test_a_press_is_its_score_of_ours(name, family):
    press, how, settings = TWINS[name]
    model, layers = _observed(family)
    score = press_score(model, press(), **how)
    # On the window a press has its maximum, and we have protection.
    before = slice(0, -WINDOW if name == "snapkv" else None)
    for evidence in layers:
        ours, got = SCORES[name].function(evidence, **settings), score(evidence)
        assert score.__name__ == press.__name__ and got.unit == ours.unit
        assert_close(got.values_BHT[..., before], ours.values_BHT[..., before], ops=MODEL)
        kept = [_kept(one.values_BHT[..., before], evidence.valid_BT[:, before]) for one in (ours, got)]
        assert torch.equal(*kept)
        for row in range(3 if name == "snapkv" else 0):  # the maximum is the sequence's, not the batch's
            forced = got.values_BHT[row, :, -WINDOW:]
            assert torch.equal(forced, got.values_BHT[row].amax().expand_as(forced))


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
    shape = r"Returns.score returned \[1, 2, 8\], maybe with NaN for layer 1; wanted .*\[1, 2, 40\]"
    refused(shape, press_score(model, Returns(lambda keys: keys[:, :, 0])), layers[1])
    with pytest.raises(ZeroDivisionError):
        press_score(model, Returns(lambda keys: 1 / 0))(layers[0])
    assert not hasattr(describe(model)[0].module, "rotary_emb")
    broken = Returns(lambda keys: keys[..., 0].index_fill(2, torch.tensor(7), torch.nan))
    refused(r"returned \[1, 2, 40\], maybe with NaN for layer 1", press_score(model, broken), layers[1])
