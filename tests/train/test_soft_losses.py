"""End-to-end terms agree with naive float64 versions, in value and gradient, and hold nothing quadratic."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM

import retain.train.objectives.soft_losses as soft_losses
from retain.train.objectives.soft_losses import (
    NO_TOKEN,
    admitted_term,
    capacity_term,
    head_of,
    open_entries,
    open_share,
    rows_of,
    vocabulary_terms,
)
from tests.tiny import FAMILIES, tiny_batch, tiny_model

B, H, T, N, E, V = 2, 3, 24, 7, 5, 11
TINY = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32},
    **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(E, V, bias=False).double().requires_grad_(False)


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    gated, full = (torch.randn(N, E, dtype=torch.float64) * 4 for _ in range(2))
    return gated, full, torch.tensor([3, 0, NO_TOKEN, 7, 10, NO_TOKEN, 2])


def shares(logits: list[float]) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [x / sum(weights) for x in weights]


@pytest.mark.parametrize("chunk", [3, 100])
def test_divergences_are_named_after_what_they_average_over(chunk) -> None:
    model_head, (gated, full, following) = head(), states()

    def logits(hidden: torch.Tensor) -> list[float]:
        return [float(hidden @ weight_E) for weight_E in model_head.weight]

    expected: dict[str, list[float]] = {"kl_forward": [], "kl_reverse": [], "next_token": []}
    for n in range(N):
        p, q = (shares(logits(hidden[n])) for hidden in (full, gated))
        expected["kl_forward"].append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        expected["kl_reverse"].append(sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))
        token = int(following[n])
        expected["next_token"].append(0.0 if token == NO_TOKEN else -math.log(q[token]))
    found = vocabulary_terms(model_head, gated, full, following, list(expected), chunk=chunk)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(value, dtype=torch.float64))
    # Not symmetric here: a swap of the two would not pass.
    gap = (found["kl_forward"] - found["kl_reverse"]).abs()
    assert (gap > 1e-3 * found["kl_forward"]).all()


@pytest.mark.parametrize("name", ["kl_forward", "kl_reverse", "next_token"])
def test_the_gradient_is_made_from_logits_that_are_made_again(name: str) -> None:
    model_head, (gated, full, following) = head(), states()
    gated.requires_grad_()

    def of(x: torch.Tensor) -> torch.Tensor:
        return vocabulary_terms(model_head, x, full, following, [name], chunk=3)[name]

    assert torch.autograd.gradcheck(of, (gated,))
    assert vocabulary_terms(model_head, gated, full, following, [], chunk=3) == {}


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    sizes = []

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return super().forward(x)

    counted_head = Counted(E, V, bias=False).double().requires_grad_(False)
    gated, full, following = states()
    gated.requires_grad_()
    vocabulary_terms(counted_head, gated, full, following, ["kl_forward"], chunk=3)[
        "kl_forward"
    ].sum().backward()
    assert sizes == [3, 3, 3, 3, 1, 1, 1, 1, 3, 3, 3, 3]  # gated and full, then again from the last chunk on


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_that_of_the_model(family: str) -> None:
    model = tiny_model(family)
    hidden = model.base_model(input_ids=tiny_batch((0,), 6)[0], use_cache=False).last_hidden_state[0]
    wanted = model(input_ids=tiny_batch((0,), 6)[0], use_cache=False).logits[0]
    torch.testing.assert_close(head_of(model)(hidden), wanted)


def test_a_head_that_caps() -> None:
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**TINY, final_logit_softcapping=0.5)).eval()
    ids = torch.tensor([[5, 9, 13]])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    found, wanted = head_of(model)(hidden), model(input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(model.get_output_embeddings()(hidden), wanted, rtol=1e-3)


def test_a_head_that_is_not_understood_is_refused() -> None:
    model = tiny_model("qwen3")
    projection = model.lm_head

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + 1.0
            return output

    model.__class__ = Odd
    with pytest.raises(ValueError, match="logits of Odd are not what its output embeddings give"):
        head_of(model)
    assert model.lm_head is projection


# How much is open.


def gates_of(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    valid = torch.arange(T) >= torch.tensor([[0], [5]])
    return functional.logsigmoid(torch.randn(B, H, T, dtype=torch.float64)), valid


def naive_open(phi: torch.Tensor, valid: torch.Tensor, t: int, protected: int, ages: bool) -> torch.Tensor:
    total = torch.zeros(B, H, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for i in range(t + 1):
                if valid[b, i]:
                    power = (t - i) if ages else 1
                    near = t - i < protected
                    total[b, h] += 1.0 if near else math.exp(power * float(phi.detach()[b, h, i]))
    return total


@pytest.mark.parametrize("ages", [False, True])
@pytest.mark.parametrize("protected", [0, 6, 100])
@pytest.mark.parametrize("block", [400, 2**22])
def test_open_entries_are_counted_without_a_matrix(ages, protected, block, monkeypatch) -> None:
    monkeypatch.setattr(soft_losses, "BLOCK", block)
    phi, valid = gates_of()
    rows = torch.tensor([0, 4, 5, 17, T - 1])
    found = open_entries(phi, valid, rows[None], protected=protected, ages=ages)
    expected = [naive_open(phi, valid, int(t), protected, ages) for t in rows]
    torch.testing.assert_close(found, torch.stack(expected, -1))
    phi.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: open_entries(x, valid, rows[None], protected=protected, ages=ages), (phi,)
    )


def test_rows_are_those_of_each_sequence() -> None:
    valid = torch.arange(12) >= torch.tensor([[0], [7], [9]])
    assert rows_of(valid, 4).tolist() == [[2, 5, 8, 11], [7, 8, 10, 11], [8, 9, 10, 11]]
    assert rows_of(valid, 0)[0].tolist() == list(range(12))
    for count in (0, 2, 4, 6, 20):
        rows, seen = rows_of(valid, count), valid.cumsum(-1) * valid
        for b, n in enumerate((12, 5, 3)):
            counted = [int(t) for t in seen[b][rows[b]] if t > 0]
            even = [round(n * (k + 1) / count) for k in range(count)] if 0 < count < n else range(1, n + 1)
            assert counted == [*even], "padding counts as nothing"


@pytest.mark.parametrize("shared", [False, True])
def test_capacity(shared: bool) -> None:
    phi, valid = gates_of()
    rows = torch.arange(T)
    open_BHR = open_entries(phi, valid, rows[None], protected=2, ages=True)
    if shared:
        open_BHR = open_BHR.mean(1, keepdim=True)
    seen = (valid.cumsum(-1) * valid).double()
    limit = 0.2 * seen if shared else torch.full_like(seen, 3.0)
    expected = []
    for b in range(B):
        heads = []
        for h in range(open_BHR.shape[1]):
            terms = []
            for t in range(T):
                if valid[b, t]:
                    excess = max(0.0, float(open_BHR[b, h, t] - limit[b, t]))
                    terms.append(excess / float(seen[b, t]))
            heads.append(sum(terms) / len(terms))
        expected.append(sum(heads) / len(heads))
    found = capacity_term(open_BHR, seen, limit)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def shares_open(phi: torch.Tensor, valid: torch.Tensor) -> list[float]:
    means = []
    for b in range(B):
        each = [math.exp(float(phi[b, h, i])) for h in range(H) for i in range(T) if valid[b, i]]
        means.append(sum(each) / len(each))
    return means


def test_open_share() -> None:
    phi, valid = gates_of()
    other = gates_of(4)[0]
    layers = [phi, other]
    both = [(a + b) / 2 for a, b in zip(shares_open(phi, valid), shares_open(other, valid), strict=True)]
    torch.testing.assert_close(open_share(layers, valid), torch.tensor(both, dtype=torch.float64))


@pytest.mark.parametrize("protected", [0, 4])
def test_admitted_share(protected: int) -> None:
    phi, valid = gates_of()
    expected = []
    for b in range(B):
        terms, n = [], int(valid[b].sum())
        for h in range(H):
            for i in range(T):
                if valid[b, i]:
                    s = i - (T - n)
                    off, g = min(1.0, protected / (n - s)), math.exp(float(phi[b, h, i]))
                    terms.append(off + (1 - off) * (1 - (1 - g) ** 2))
        expected.append(sum(terms) / len(terms))
    found = admitted_term([phi], valid, protected)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
