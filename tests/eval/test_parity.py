"""The tool that compares scores with the field's main library, on stand-ins for its scorers."""

import pytest
import torch

from retain.eval import parity
from retain.hf.model import observe
from tests.tiny import tiny_batch, tiny_model


class KnormPress:
    def __init__(self, ratio, sign=-1.0):
        self.sign = sign

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.sign * keys.norm(dim=-1)


class Library:
    KnormPress = KnormPress


@pytest.mark.parametrize(("sign", "alike"), [(-1.0, True), (1.0, False)])
def test_agreement_and_disagreement_show(sign, alike):
    model, (ids, mask) = tiny_model("qwen3"), tiny_batch((0, 3, 11), 60)
    pair = parity.Pair("KnormPress", "knorm", press_settings={"sign": sign}, first=2, last=5)
    worst, shared = parity.compare_pair(Library, pair, model, observe(model, ids, mask))
    assert (worst < 1e-6 and shared == 1.0) if alike else (worst > 1.0 and shared < 0.5)


def test_without_the_library_the_tool_says_how_to_get_it(monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(parity.importlib, "import_module", missing)
    with torch.random.fork_rng():
        assert parity.main() == 2
    assert "No module named 'kvpress': pip install --no-deps kvpress" in capsys.readouterr().err
