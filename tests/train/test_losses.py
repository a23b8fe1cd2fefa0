"""The losses and the overlap agree with three-loop float64 versions, per document and per head."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from retain.attention.chunked import truncate
from retain.evidence import Evidence, attention_probs
from retain.gates import Gate, GateInputs
from retain.train.objectives.case import Case, LossSettings, keyed_generator
from retain.train.objectives.fit import check_fit, check_losses
from retain.train.objectives.layer_output import layer_output, relative_change
from retain.train.objectives.losses import TERMS, local_losses, pair_draws, total_loss
from retain.train.objectives.overlap import head_overlaps
from tests.naive import naive_overlap
from tests.refused import refused

H, T = 3, 40


class OfUnit(Gate):
    """A gate of some unit; nothing of it runs."""

    family = "of unit"

    def __init__(self, unit: str, *, ages: bool = False):
        super().__init__(E=4, H=H)
        self.__dict__.update(unit=unit, ages=ages)
        self.risk_floor_H.fill_(1e-3)

    def forward(self, inputs: GateInputs) -> torch.Tensor:
        raise NotImplementedError("nothing of it runs")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_draws_depend_on_the_key_alone() -> None:
    first, again, other = (keyed_generator(key).initial_seed() for key in [(3, 1, 4), (3, 1, 4), (3, 4, 1)])
    assert first == again != other


KEY = (5, 1, 2, 0)


def one(unit: str, *, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, OfUnit]:
    """Output, target and mask of a gate of some unit, `[H, T]` float64."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(H, T, dtype=torch.float64, generator=generator) ** 3
    output = torch.rand(H, T, dtype=torch.float64, generator=generator)
    if unit == "log_risk":
        output = (output + 1e-3).log()
    reached = (torch.arange(T) >= 2) & (torch.arange(T) < torch.tensor([[38], [30], [33]]))
    return output, target.masked_fill(~reached, 0.0), reached, OfUnit(unit)


def of(name: str, unit: str = "mass", *, reached=None, output=None, target=None, view=None, **settings):
    known = one(unit)
    output = known[0] if output is None else output
    target = known[1] if target is None else target
    reached = known[2] if reached is None else reached
    loss = LossSettings(terms={name: 1.0}, **settings)
    found = local_losses(Case(output[None], target[None], reached[None], known[3], loss, KEY, view, 4))
    assert list(found) == [name] and found[name].shape == ()
    return found[name]


@pytest.mark.parametrize(
    ("name", "unit", "each"),
    [
        *(("mse", unit, lambda p, t: (p - t) ** 2) for unit in ("log_risk", "mass", "risk", "rank")),
        ("smooth_l1", "log_risk", lambda p, t: (p - t) ** 2 / 2 if abs(p - t) < 1 else abs(p - t) - 0.5),
        ("bce", "mass", lambda p, t: -(t * math.log(p) + (1 - t) * math.log(1 - p))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_terms_that_are_a_mean_over_entries(name: str, unit: str, each) -> None:
    """A function of output and target in the gate's unit, over a head's reached entries, then over heads."""
    output, target, reached, _ = one(unit)
    heads = []
    for h in range(H):
        terms = []
        for i in range(T):
            if reached[h, i]:
                wanted = float(target[h, i])
                terms.append(
                    each(float(output[h, i]), math.log(wanted + 1e-3) if unit == "log_risk" else wanted)
                )
        heads.append(sum(terms) / len(terms))
    expected = torch.tensor(sum(heads) / H, dtype=torch.float64)
    # The floor is a float32 number of the gate.
    torch.testing.assert_close(of(name, unit), expected, rtol=1e-6, atol=0.0)


def test_pairs_across_the_boundaries() -> None:
    output, target, reached, _ = one("mass")
    given = {"keep_ratios": (0.2, 0.5), "pairs": 5, "band": 0.1, "temperature": 0.5}
    uniform = pair_draws(KEY, num_heads=H, settings=LossSettings(**given))
    terms = []
    for h in range(H):
        ranked = sorted((i for i in range(T) if reached[h, i]), key=lambda i: -float(target[h, i]))
        width = math.ceil(0.1 * len(ranked))
        for (k, ratio), p in itertools.product(enumerate((0.2, 0.5)), range(5)):
            boundary = round(ratio * len(ranked))
            i = ranked[boundary - 1 - int(uniform[h, k, p, 0] * width)]
            j = ranked[boundary + int(uniform[h, k, p, 1] * width)]
            ahead = float(output[h, i] - output[h, j])
            terms.append(math.log1p(math.exp(-ahead / 0.5)))
    assert float(of("pairwise", **given)) == pytest.approx(sum(terms) / len(terms))


def test_overlap() -> None:
    output, target, reached, _ = one("mass")
    wanted = torch.tensor(naive_overlap(output, target, reached))
    torch.testing.assert_close(head_overlaps(output, target, reached), wanted)
    assert (head_overlaps(target, target, reached) == 1).all()


@pytest.mark.parametrize("said", [0.0, 1.0, -0.2])
def test_a_gate_that_is_sure_and_wrong_can_come_back(said: float) -> None:
    _, target, reached, _ = one("mass")
    output, target, place = target.clamp(0.05, 0.95), target.clone(), (1, 9)
    assert reached[place]
    output[place], target[place] = said, 0.9 - 0.8 * (said > 0.5)
    output.requires_grad_()
    of("bce", output=output, target=target).backward()
    assert output.grad is not None
    pull, others = output.grad[place], output.grad[reached & (output.detach() != said)]
    assert (pull > 0) == (said > 0.5) and pull.abs() > 10 * others.abs().max()


def test_smoothness_of_neighbours() -> None:
    output, _, reached, _ = one("mass")
    heads = []
    for h in range(H):
        steps = [
            float(output[h, i] - output[h, i + 1]) ** 2
            for i in range(T - 1)
            if reached[h, i] and reached[h, i + 1]
        ]
        heads.append(sum(steps) / len(steps))
    torch.testing.assert_close(of("smooth"), torch.tensor(sum(heads) / H, dtype=torch.float64))


def evidence_of(num_tokens: int = T, queries: int = T, *, sinks=False, seed: int = 0) -> Evidence:
    """A layer of two query heads a KV head, `queries` of them the last of its entries, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return Evidence(
        layer_idx=0,
        queries_BQSD=2 * normal(1, 2 * H, queries, 8),
        keys_BHTD=normal(1, H, num_tokens, 8),
        values_BHTD=normal(1, H, num_tokens, 8),
        output_weight_QDE=normal(2 * H, 8, 16),
        scaling=8**-0.5,
        positions_BT=torch.arange(num_tokens)[None],
        valid_BT=torch.ones(1, num_tokens, dtype=torch.bool),
        sinks_Q=normal(2 * H) if sinks else None,
    )


def naive_output(evidence: Evidence, keep: torch.Tensor, horizon: int) -> torch.Tensor:
    """Rows of attention, masked, renormalised (with the sink's share), projected: a loop over queries."""
    S, T_ = evidence.num_queries, evidence.num_seen
    probs = attention_probs(evidence, 0, S)[0]
    rows = []
    for s in range(S):
        total = torch.zeros(16, dtype=torch.float64)
        for q in range(2 * H):
            a = probs[q, s]
            far = T_ - S + s - torch.arange(T_) >= horizon
            kept = torch.where(far, a * keep[q // 2], a)
            share = kept / (kept.sum() + 1 - a.sum())  # 1 - sum: what a sink took
            total += (share @ evidence.values_BHTD[0, q // 2]) @ evidence.output_weight_QDE[q]
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("sinks", [False, True])
def test_the_layers_output_under_a_keep_mask(sinks: bool) -> None:
    evidence = evidence_of(sinks=sinks)
    keep = torch.rand(H, T, dtype=torch.float64)
    whole, masked = (naive_output(evidence, mask, 5) for mask in (torch.ones_like(keep), keep))
    found = relative_change(evidence, keep.log()[None], 5, layer_output(evidence, None, 5))
    torch.testing.assert_close(found, (whole - masked).norm(dim=-1).mean() / whole.norm(dim=-1).mean())


def view_of(document: Evidence, *branches: Evidence) -> SimpleNamespace:
    return SimpleNamespace(document=document, branches=tuple(("appendix", evidence) for evidence in branches))


def soft_threshold(predicted, reached, h: int, ratio: float, temperature: float) -> float:
    said = [float(predicted[h, i]) for i in range(T) if reached[h, i]]
    low, high = min(said) - 10.0, max(said) + 10.0
    for _ in range(200):
        middle = (low + high) / 2
        kept = sum(1 / (1 + math.exp(-(x - middle) / temperature)) for x in said)
        low, high = (middle, high) if kept > round(ratio * len(said)) else (low, middle)
    return (low + high) / 2


def test_layer_output_is_the_mean_over_budgets_document_and_branches() -> None:
    output, _, reached, _ = one("mass")
    document, branch = evidence_of(), evidence_of(T + 6, 6, seed=1)
    settings = {"keep_ratios": (0.2, 0.5), "temperature": 0.3, "output_queries": 0}
    found = of("layer_output", view=view_of(document, branch), **settings)
    values = []
    for ratio in (0.2, 0.5):
        keep = torch.ones(H, T, dtype=torch.float64)
        for h in range(H):
            cut = soft_threshold(output, reached, h, ratio, 0.3)
            for i in range(T):
                if reached[h, i]:
                    keep[h, i] = 1 / (1 + math.exp(-float(output[h, i] - cut) / 0.3))
        for evidence, horizon in ((document, 4), (branch, 0)):
            wide = torch.cat([keep, torch.ones(H, evidence.num_seen - T, dtype=torch.float64)], -1)
            first = horizon if evidence is document else 0
            whole = naive_output(evidence, torch.ones_like(wide), horizon)[first:]
            masked = naive_output(evidence, wide, horizon)[first:]
            values.append((whole - masked).norm(dim=-1).mean() / whole.norm(dim=-1).mean())
    torch.testing.assert_close(found, torch.stack(values).mean())


def test_layer_output_looks_at_a_keyed_stretch_of_queries() -> None:
    document = evidence_of()
    few = [
        float(of("layer_output", view=view_of(document), output_queries=n)) for n in (3, 3, 0, T - 4, 10 * T)
    ]
    assert few[0] == few[1] != few[2] and few[2] == few[3] == few[4]


@pytest.mark.parametrize("unit", ["log_risk", "mass"])
@pytest.mark.parametrize("name", sorted(TERMS))
def test_gradients_are_those_of_finite_differences(name: str, unit: str) -> None:
    if unit == "log_risk" and name in ("bce", "smooth_l1"):
        unit = "risk" if name == "smooth_l1" else "mass"
    output = one(unit)[0]
    output.requires_grad_()
    view = view_of(evidence_of())
    settings = {"keep_ratios": (0.25,)}
    of(name, unit, output=output, view=view, **settings).backward()
    gradient, reached = output.grad, one(unit)[2]
    assert gradient is not None and (gradient[~reached] == 0).all() and gradient[reached].any()
    for h, i in [(0, 5), (1, 12), (1, 29), (2, 20), (2, 31)]:
        moved = []
        for sign in (1, -1):
            nudged = output.detach().clone()
            nudged[h, i] += sign * 1e-6
            moved.append(float(of(name, unit, output=nudged, view=view, **settings)))
        torch.testing.assert_close(float(gradient[h, i]), (moved[0] - moved[1]) / 2e-6, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("unit", ["log_risk", "mass"])
@pytest.mark.parametrize("odd", ["unreached", "ties", "one", "zeros", "infinite"])
@pytest.mark.parametrize("name", sorted(TERMS))
def test_odd_documents_are_finite(name: str, odd: str, unit: str) -> None:
    output, target, reached, _ = one(unit)
    view = view_of(evidence_of())
    if odd == "unreached":
        reached = torch.zeros_like(reached)
    elif odd == "ties":
        output, target = torch.full_like(output, 0.5), torch.full_like(target, 0.25)
    elif odd == "one":
        output, target, reached = output[:, :1], target[:, :1], torch.ones_like(reached[:, :1])
        view = view_of(truncate(evidence_of(), 1), evidence_of(1 + 3, 3))
    elif odd == "zeros":
        target = torch.zeros_like(target)
    else:
        output = output.masked_fill(~reached, torch.inf)
    output = output.clone().requires_grad_()
    loss = of(name, unit, output=output, target=target, reached=reached, view=view)
    loss.backward()
    assert loss.isfinite() and output.grad is not None and output.grad.isfinite().all()
    if odd == "unreached" or (odd == "ties" and name == "pairwise"):
        assert loss == 0 and not output.grad.any()


def test_the_total_weighs_the_terms_and_a_view_is_asked_for() -> None:
    settings = LossSettings(terms={"mse": 2.0, "smooth": 0.0, "bce": 0.5})
    output, target, reached, gate = one("mass")
    found = local_losses(Case(output[None], target[None], reached[None], gate, settings, (0,), None, 4))
    assert list(found) == ["mse", "smooth", "bce"]
    assert total_loss(found, settings) == 2.0 * found["mse"] + 0.5 * found["bce"]
    assert LossSettings().terms == {"mse": 1.0, "pairwise": 0.5}, "those of the golden curve"
    refused("pass view=", of, "layer_output")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"terms": {"pairwize": 1.0, "mse": 1.0}}, "did you mean 'pairwise'"),
        ({"terms": {"mse": 0.0}}, "trains on nothing"),
        (
            {"terms": {"layer_output": 1.0, "pairwise": 1.0}, "keep_ratios": ()},
            "layer_output, pairwise need at least one of loss.keep_ratios",
        ),
        ({"terms": {"pairwise": 1.0}, "pairs": 0}, "pairs=0: pairwise needs at least 1"),
    ],
)
def test_terms_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    refused(message, check_losses, LossSettings(**settings))
    check_losses(LossSettings(terms={"mse": 1.0}, keep_ratios=(), pairs=0))


def test_terms_of_another_unit_are_refused() -> None:
    with pytest.raises(ValueError, match="bce is for gates whose output is mass.*log_risk: use mse"):
        check_fit(LossSettings(terms={"bce": 1.0}), OfUnit("log_risk"))
    refused("a decay per token.*end_to_end", check_fit, LossSettings(), OfUnit("rank", ages=True))
    check_fit(LossSettings(terms={"bce": 1.0, "smooth_l1": 1.0}), OfUnit("mass"))
