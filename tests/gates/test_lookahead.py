"""Lookahead gates against three loops in float64; their extension is plain parameters that enter a model and
leave it."""

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from retain.gates import GateInputs
from retain.gates.lookahead import LookaheadExtension, LookaheadGate

B, H, Q, T, S, D = 2, 2, 4, 9, 3, 4
SCALING = 0.7


def drawn(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Queries and keys; the second sequence is padded."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"queries": (B, Q, S, D), "keys": (B, H, T, D), "behind": (B, H, S, D)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def padding() -> torch.Tensor:
    return torch.arange(T) >= torch.tensor([0, 4])[:, None]


def naive(parts, valid, soft_cap=None, sinks=None) -> torch.Tensor:
    """The formula of `LookaheadGate`, entry by entry."""
    score = torch.zeros(B, H, T, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            per_query = []
            for q in range(h * Q // H, (h + 1) * Q // H):
                paid = torch.zeros(T, dtype=torch.float64)
                for p in range(S):
                    weights = {}
                    for i in [*range(T), *range(T, T + p + 1)]:
                        if i < T and not bool(valid[b, i]):
                            continue
                        key = parts["keys"][b, h, i] if i < T else parts["behind"][b, h, i - T]
                        logit = SCALING * float(parts["queries"][b, q, p] @ key)
                        capped = logit if soft_cap is None else soft_cap * math.tanh(logit / soft_cap)
                        weights[i] = math.exp(capped)
                    total = sum(weights.values()) + (0.0 if sinks is None else math.exp(float(sinks[q])))
                    for i, weight in weights.items():
                        if i < T:
                            paid[i] += weight / total / S
                per_query.append(paid)
            score[b, h] = torch.stack(per_query).mean(0)
    return score


SINKS = torch.linspace(-1.0, 1.0, Q, dtype=torch.float64)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_the_score_is_the_papers_and_so_is_the_path_of_gradients(
    soft_cap: float | None, sinks: torch.Tensor | None
) -> None:
    parts, valid = drawn(), padding()
    settings = {
        "soft_cap": soft_cap,
        "sinks_Q": sinks,
        "scaling": SCALING,
        "valid_BT": valid,
    }
    inputs = GateInputs(
        keys_BHTD=parts["keys"],
        lookahead_BQSD=parts["queries"],
        lookahead_keys_BHSD=parts["behind"],
        **settings,
    )
    gate = LookaheadGate(E=6, H=H)
    got = gate(inputs)
    wanted = naive(parts, valid, soft_cap, sinks)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert (got[1, :, :4] == 0).all()
    assert (got.sum(-1) < 1).all()
    for valid_BT in (None, valid):
        inputs = replace(inputs, valid_BT=valid_BT)
        found = gate(inputs)
        for name in ("keys_BHTD", "lookahead_BQSD", "lookahead_keys_BHSD"):
            leaves = replace(inputs, **{name: getattr(inputs, name).clone().requires_grad_()})
            rows = gate(leaves)
            assert rows.requires_grad and not found.requires_grad
            torch.testing.assert_close(rows.detach(), found, rtol=1e-12, atol=1e-14)
            with torch.no_grad():
                assert torch.equal(gate(leaves), found)


def test_wrong_settings_are_refused() -> None:
    for wrong in ({"num_tokens": 0}, {"rank": 0}, {"alpha": 0.0}):
        with pytest.raises(ValueError, match="wanted at least one token, a rank of at least 1"):
            LookaheadExtension(**{"E": 6, "modules": {}, **wrong})


class Decoder(nn.Module):
    """A module with two linear parts, as a decoder would name them."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"q_proj": nn.Linear(6, width), "mlp": nn.Linear(width, 6)})]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0]["mlp"](self.layers[0]["q_proj"](x))


def extension(width: int = 6, **settings) -> LookaheadExtension:
    made = LookaheadExtension(
        **{"num_tokens": 2, "E": 6, "rank": 2, "alpha": 6.0, "modules": {"layers.0.q_proj": (6, width)}}
        | settings
    )
    nn.init.normal_(made.up["layers/0/q_proj"])
    return made


def test_the_adapter_is_the_formula_inside_and_nothing_outside() -> None:
    model, mine, x = Decoder(), extension(), torch.randn(3, 6)
    before, modules = model(x), list(model.modules())
    with mine.extend(model):
        inside = model(x)
    inner = x @ model.layers[0]["q_proj"].weight.T + model.layers[0]["q_proj"].bias
    inner = inner + 3.0 * x @ mine.down["layers/0/q_proj"].T @ mine.up["layers/0/q_proj"].T
    torch.testing.assert_close(inside, model.layers[0]["mlp"](inner))
    assert torch.equal(model(x), before) and not torch.allclose(inside, before)
    assert list(model.modules()) == modules
    inside.sum().backward()
    assert mine.down["layers/0/q_proj"].grad is not None and mine.up["layers/0/q_proj"].grad is not None


def inside_of(mine: LookaheadExtension, model: Decoder, x: torch.Tensor) -> torch.Tensor:
    with mine.extend(model):
        return model(x)


def test_a_model_that_is_extended_already_is_refused() -> None:
    model, mine, x = Decoder(), extension(), torch.randn(3, 6)
    refused = pytest.raises(ValueError, match="lookahead gates extend a model already: leave")
    before = model(x)
    with mine.extend(model), refused, extension().extend(model):
        pass
    assert torch.equal(model(x), before) and "forward" not in vars(model.layers[0]["q_proj"])


def elsewhere(function):
    """Result of a function on another thread."""
    found = []

    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@torch.no_grad()
def test_other_threads_run_the_plain_model_or_other_lookahead_gates() -> None:
    model, mine, other, x = Decoder(), extension(), extension(), torch.randn(3, 6)
    plain, state = model(x), list(model.state_dict())
    alone = [inside_of(each, model, x) for each in (mine, other)]
    with mine.extend(model):
        assert torch.equal(elsewhere(lambda: model(x)), plain)
        assert elsewhere(lambda: list(model.state_dict())) == state
        assert torch.equal(elsewhere(lambda: inside_of(other, model, x)), alone[1])
        assert torch.equal(elsewhere(lambda: inside_of(mine, model, x)), alone[0])
        assert torch.equal(model(x), alone[0])
    assert torch.equal(model(x), plain) and "forward" not in vars(model.layers[0]["q_proj"])


def test_training_reaches_threads_of_autograd() -> None:
    model, mine, x = Decoder(), extension(), torch.randn(3, 6)
    wanted = inside_of(mine, model, x)
    with pytest.raises(KeyError, match="midway"), mine.extend(model):
        assert torch.equal(elsewhere(lambda: model(x)), wanted)
        raise KeyError("midway")
    assert not torch.equal(model(x), wanted)
