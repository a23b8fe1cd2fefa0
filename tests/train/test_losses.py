"""The losses and the overlap agree with three-loop float64 versions, per document and per head."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from retain.attention.chunked import truncate
from retain.evidence import Evidence, attention_probs
from retain.gates import Gate, GateInputs
from retain.train.objectives.case import LossSettings, keyed_generator
from retain.train.objectives.fit import check_fit, check_losses
from retain.train.objectives.layer_output import (
    bound_coefficients,
    layer_output,
    relative_change,
)
from retain.train.objectives.losses import TERMS, local_losses, total_loss
from retain.train.objectives.overlap import head_overlaps
from retain.train.objectives.ranked_losses import pair_draws
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
    found = local_losses(output, known[3], target, reached, view, loss, KEY, horizon=4)
    assert list(found) == [name] and found[name].shape == ()
    return found[name]


def huber(d: float, delta: float) -> float:
    return 0.5 * d * d if abs(d) <= delta else delta * (abs(d) - 0.5 * delta)


@pytest.mark.parametrize(
    ("name", "unit", "settings", "each"),
    [
        *(("mse", unit, {}, lambda p, t: (p - t) ** 2) for unit in ("log_risk", "mass", "risk", "rank")),
        ("huber", "log_risk", {"huber_delta": 0.7}, lambda p, t: huber(p - t, 0.7)),
        ("smooth_l1", "mass", {"smooth_l1_beta": 0.3}, lambda p, t: huber(p - t, 0.3) / 0.3),
        ("bce", "mass", {}, lambda p, t: -(t * math.log(p) + (1 - t) * math.log(1 - p))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_terms_that_are_a_mean_over_entries(name: str, unit: str, settings: dict, each) -> None:
    """Of the output and the target in the gate's own unit, over a head's reached entries, then over heads."""
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
    torch.testing.assert_close(of(name, unit, **settings), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["pairwise", "hinge"])
def test_pairs_across_the_boundaries(kind: str) -> None:
    output, target, reached, _ = one("mass")
    given = {"keep_ratios": (0.2, 0.5), "pairs": 5, "band": 0.1, "temperature": 0.5, "margin": 0.4}
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
            terms.append(math.log1p(math.exp(-ahead / 0.5)) if kind == "pairwise" else max(0, 0.4 - ahead))
    assert float(of(kind, **given)) == pytest.approx(sum(terms) / len(terms))


def test_overlap() -> None:
    output, target, reached, _ = one("mass")
    wanted = torch.tensor(naive_overlap(output, target, reached))
    torch.testing.assert_close(head_overlaps(output, target, reached), wanted)
    assert (head_overlaps(target, target, reached) == 1).all()


@pytest.mark.parametrize(
    ("name", "said"), [("bce", 0.0), ("bce", 1.0), ("bce", -0.2), ("listwise", 0.0), ("listwise", -0.2)]
)
def test_a_gate_that_is_sure_and_wrong_can_come_back(name: str, said: float) -> None:
    _, target, reached, _ = one("mass")
    output, target, place = target.clamp(0.05, 0.95), target.clone(), (1, 9)
    assert reached[place]
    output[place], target[place] = said, 0.9 - 0.8 * (said > 0.5)
    output.requires_grad_()
    of(name, output=output, target=target).backward()
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


def threshold(predicted, reached, h: int, ratio: float) -> float:
    ranked = sorted((float(predicted[h, i]) for i in range(T) if reached[h, i]), reverse=True)
    k = round(ratio * len(ranked))
    return (ranked[k - 1] + ranked[k]) / 2


def test_boundary_asks_keep_or_drop_near_the_cut() -> None:
    output, target, reached, _ = one("mass")
    ratios, total = (0.2, 0.5), 0.0
    for ratio in ratios:
        for h in range(H):
            ranked = sorted((i for i in range(T) if reached[h, i]), key=lambda i: -float(target[h, i]))
            k, w = round(ratio * len(ranked)), math.ceil(0.1 * len(ranked))
            cut = threshold(output, reached, h, ratio)
            terms = []
            for rank in range(k - w, k + w):
                z = (float(output[h, ranked[rank]]) - cut) / 0.3
                keep = 1 / (1 + math.exp(-z))
                terms.append(-math.log(keep if rank < k else 1 - keep))
            total += sum(terms) / len(terms) / H / len(ratios)
    found = of("boundary", keep_ratios=ratios, band=0.1, temperature=0.3)
    torch.testing.assert_close(found, torch.tensor(total, dtype=torch.float64))


@pytest.mark.parametrize(
    ("unit", "listwise"), [("mass", "sum"), ("log_risk", "sum"), ("mass", "softmax"), ("rank", "softmax")]
)
def test_listwise_is_a_divergence_from_the_target(unit: str, listwise: str) -> None:
    output, target, reached, _ = one(unit)
    heads = []
    for h in range(H):
        entries = [i for i in range(T) if reached[h, i]]
        said = [float(output[h, i]) for i in entries]
        if listwise == "softmax":
            weights = [math.exp(x / 0.7) for x in said]
        else:
            weights = [math.exp(x) for x in said] if unit == "log_risk" else said
        wanted = [float(target[h, i]) for i in entries]
        p = [x / sum(wanted) for x in wanted]
        q = [x / sum(weights) for x in weights]
        heads.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
    found = of("listwise", unit, listwise=listwise, temperature=0.7)
    torch.testing.assert_close(found, torch.tensor(sum(heads) / H, dtype=torch.float64))
    if unit == "mass" and listwise == "sum":
        assert of("listwise", output=3.0 * target.clamp_min(1e-6)).abs() < 1e-4, "0 where the shares agree"


def evidence_of(
    num_tokens: int = T, queries: int = T, *, window=None, sinks=False, seed: int = 0
) -> Evidence:
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
        window=window,
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


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (12, False), (None, True)])
@pytest.mark.parametrize("order", [1, 2])
def test_the_layers_output_under_a_keep_mask(window: int | None, sinks: bool, order: int) -> None:
    evidence = evidence_of(window=window, sinks=sinks)
    keep = torch.rand(H, T, dtype=torch.float64)
    whole, masked = (naive_output(evidence, mask, 5) for mask in (torch.ones_like(keep), keep))
    found = relative_change(evidence, keep.log()[None], 5, order)
    expected = (whole - masked).norm(order, dim=-1).mean() / whole.norm(order, dim=-1).mean()
    torch.testing.assert_close(found, expected)
    coefficients = bound_coefficients(evidence, 5, T)
    moved = (layer_output(evidence, None, 5) - layer_output(evidence, keep.log()[None], 5))[0]
    bound = (coefficients[0] * (1 - keep)).sum()
    assert moved.norm(1, dim=-1).mean() <= bound and moved.norm(2, dim=-1).mean() <= bound
    assert bound < 60 * moved.norm(1, dim=-1).mean(), "a bound, not just any large number"


def test_the_bounds_coefficients() -> None:
    evidence = evidence_of()
    probs = attention_probs(evidence, 0, T)[0]
    norms = torch.einsum(
        "htd,hgde->hgte", evidence.values_BHTD[0], evidence.output_weight_QDE.view(H, 2, 8, 16)
    )
    norms = norms.abs().sum(-1)
    expected = torch.zeros(H, T, dtype=torch.float64)
    for h in range(H):
        for g in range(2):
            for i in range(T):
                paid = sum(float(probs[2 * h + g, j, i]) for j in range(i + 5, T)) / T
                expected[h, i] += paid * float(norms[h, g, i] + norms[h, g].max())
    torch.testing.assert_close(bound_coefficients(evidence, 5, T)[0], expected)


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


@pytest.mark.parametrize("form", ["exact", "bound"])
def test_layer_output_is_the_mean_over_budgets_document_and_branches(form: str) -> None:
    output, _, reached, _ = one("mass")
    document, branch = evidence_of(), evidence_of(T + 6, 6, seed=1)
    settings = {"keep_ratios": (0.2, 0.5), "temperature": 0.3, "output_queries": 0}
    found = of("layer_output", view=view_of(document, branch), layer_output=form, **settings)
    values = []
    for ratio in (0.2, 0.5):
        keep = torch.ones(H, T, dtype=torch.float64)
        for h in range(H):
            cut = soft_threshold(output, reached, h, ratio, 0.3)
            for i in range(T):
                if reached[h, i]:
                    keep[h, i] = 1 / (1 + math.exp(-float(output[h, i] - cut) / 0.3))
        for evidence, horizon in ((document, 4), (branch, 0)):
            if form == "bound":
                c = bound_coefficients(evidence, horizon, T)[0]
                values.append((c * (1 - keep)).sum() / c.sum())
                continue
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
    # Thresholds are constants to the gradient: hold them still by a step that changes no order, and that
    # leaves the entries beside a cut alone.
    output.requires_grad_()
    view = view_of(evidence_of())
    settings = {"keep_ratios": (0.25,), "margin": 0.5, "smooth_l1_beta": 0.4, "huber_delta": 0.7}
    of(name, unit, output=output, view=view, **settings).backward()
    gradient, reached = output.grad, one(unit)[2]
    assert gradient is not None and (gradient[~reached] == 0).all() and gradient[reached].any()
    cuts = set()
    for h in range(H):
        ranked = sorted((i for i in range(T) if reached[h, i]), key=lambda i: -float(output.detach()[h, i]))
        k = round(0.25 * len(ranked))
        cuts |= {(h, ranked[k - 1]), (h, ranked[k])}
    for h, i in [(0, 5), (1, 12), (1, 29), (2, 20), (2, 31)]:
        if (h, i) in cuts:
            continue
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
    if odd == "unreached" or (odd == "ties" and name in ("pairwise", "hinge", "boundary")):
        assert loss == 0 and not output.grad.any()


def test_the_total_weighs_the_terms_and_a_view_is_asked_for() -> None:
    settings = LossSettings(terms={"mse": 2.0, "smooth": 0.0, "bce": 0.5})
    output, target, reached, gate = one("mass")
    found = local_losses(output, gate, target, reached, None, settings, (0,), horizon=4)
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
            {"terms": {"boundary": 1.0, "pairwise": 1.0}, "keep_ratios": ()},
            "boundary, pairwise need at least one of loss.keep_ratios",
        ),
        ({"terms": {"hinge": 1.0}, "pairs": 0}, "pairs=0: hinge, pairwise need at least 1"),
    ],
)
def test_terms_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    refused(message, check_losses, LossSettings(**settings))
    check_losses(LossSettings(terms={"listwise": 1.0}, keep_ratios=(), pairs=0))


def test_terms_of_another_unit_are_refused() -> None:
    with pytest.raises(ValueError, match="bce is for gates whose output is mass.*log_risk: use mse or huber"):
        check_fit(LossSettings(terms={"bce": 1.0}), OfUnit("log_risk"))
    refused("a decay per token.*end_to_end", check_fit, LossSettings(), OfUnit("rank", ages=True))
    check_fit(LossSettings(terms={"bce": 1.0, "smooth_l1": 1.0}), OfUnit("mass"))
