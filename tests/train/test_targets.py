"""Targets: the default recipe is future risk, others are as they are set, and senseless ones are refused."""

import pytest
import torch
from torch import Tensor

from retain.config import build
from retain.future import future_risk, future_use
from retain.hf.model import observe
from retain.train.branches import Branch, Reading
from retain.train.data import Document
from retain.train.targets import (
    TargetSettings,
    baseline_overlaps,
    check_targets,
    layer_target,
    log_risk,
    target_unit,
    token_target,
    token_targets,
)
from retain.train.teacher import Frozen, View, walk
from tests.tiny import tiny_model


def draw(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


READINGS = [
    Reading(
        Document(draw(50, 0), draw(8, 1)),
        (Branch("appendix", draw(8, 1)), Branch("repeat", draw(30, 2)), Branch("repeat", draw(20, 3))),
        key=11,
    ),
    Reading(Document(draw(30, 4), draw(3, 5)), (Branch("appendix", draw(3, 5)),), key=12),
    Reading(Document(draw(40, 6)), (), key=13),
]

Targets = dict[tuple[int, int], tuple[Tensor, Tensor]]


def targets(family: str, settings: TargetSettings) -> Targets:
    found: Targets = {}

    def see(views: list[View]) -> None:
        found.update({(view.row, view.layer_idx): layer_target(view, settings) for view in views})

    walk(Frozen(tiny_model(family), None, 0), READINGS, see)
    return found


@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "gemma3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("sources", [("own",), ("appendix",), ("own", "appendix")])
def test_the_default_recipe_is_future_risk_of_context_and_appendix(
    family: str, sources: tuple[str, ...]
) -> None:
    """Whatever else is in the row, and whatever other branches there are: today's numbers."""
    settings = TargetSettings(sources=dict.fromkeys(sources, 1.0), horizon=16, chunk=13)
    found, model = targets(family, settings), tiny_model(family)
    for row, reading in enumerate(READINGS):
        document = reading.document
        own = [source for source in sources if source == "own" or document.appendix_ids]
        for evidence in observe(model, torch.tensor([document.context_ids + document.appendix_ids])):
            target_HT, reached_HT = found[row, evidence.layer_idx]
            if not own:
                assert not reached_HT.any() and not target_HT.any()
                continue
            risk, reached = future_risk(
                evidence, document_tokens=len(document.context_ids), horizon=16, sources=own
            )
            assert target_HT.dtype == torch.float32
            assert torch.equal(reached_HT, reached[0])
            torch.testing.assert_close(target_HT, risk[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregate", ["max", "mean", "block_max", "mass"])
@pytest.mark.parametrize("weight", ["none", "value_norm", "value_norm_over_hidden"])
def test_settings_reach_the_definition(aggregate: str, weight: str) -> None:
    sources = {"own": 0.5, "repeat": 2.0, "appendix": 1.0}
    settings = build(
        {"sources": sources, "aggregate": aggregate, "weight": weight, "horizon": 7, "block": 16},
        TargetSettings,
    )

    def see(views: list[View]) -> None:
        for view in views:
            use_BHT, reached_BHT = future_use(
                view.document, view.branches, sources=sources, aggregate=aggregate, weight=weight, horizon=7,
                block=16,
            )  # fmt: skip
            target_HT, reached_HT = layer_target(view, settings)
            assert torch.equal(target_HT, use_BHT[0]) and torch.equal(reached_HT, reached_BHT[0])
            assert [source for source, _ in view.branches] == [
                branch.source for branch in READINGS[view.row].branches
            ]

    walk(Frozen(tiny_model("qwen3"), None, 0), READINGS, see)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_next"])
def test_granularities_are_means(family: str) -> None:
    settings = {"horizon": 4, "aggregate": "mean", "weight": "none"}
    head = targets(family, build(settings, TargetSettings))
    layer = targets(family, build({**settings, "granularity": "layer"}, TargetSettings))
    per_token = build({**settings, "granularity": "token"}, TargetSettings)
    tokens = token_targets(Frozen(tiny_model(family), None, 0), READINGS, per_token)
    layers = sorted({layer_idx for _, layer_idx in head})
    for row, reading in enumerate(READINGS):
        T = len(reading.document.context_ids)
        total = [0.0] * T
        for layer_idx in layers:
            of_head, reached_HT = head[row, layer_idx]
            H = len(of_head)
            for i in range(T):
                mean = sum(float(of_head[h, i]) for h in range(H)) / H
                assert layer[row, layer_idx][0][:, i].tolist() == pytest.approx([mean] * H, rel=1e-5)
                total[i] += mean / len(layers)
            assert torch.equal(layer[row, layer_idx][1], reached_HT)
        target_T, reached_T = tokens[row]
        assert target_T.tolist() == pytest.approx(total, rel=1e-5)
        assert torch.equal(reached_T, reached_HT[0])


def test_a_token_is_reached_if_any_layer_reaches_it() -> None:
    near = torch.tensor([[True, False], [True, False]])
    far = torch.tensor([[True, True], [True, True]])
    target_T, reached_T = token_target([(torch.zeros(2, 2), near), (torch.ones(2, 2), far)])
    assert target_T.tolist() == [0.5, 0.5] and reached_T.tolist() == [True, True]


@pytest.mark.parametrize(
    ("weight", "unit"), [("none", "mass"), ("value_norm", "risk"), ("value_norm_over_hidden", "rank")]
)
def test_units(weight: str, unit: str) -> None:
    assert target_unit(build({"weight": weight}, TargetSettings)) == unit


def test_log_risk() -> None:
    risk, floor = torch.rand(1, 2, 5), torch.tensor([0.1, 0.2])
    assert torch.equal(log_risk(risk, floor)[0, 1], (risk[0, 1] + 0.2).log())
    assert torch.equal(log_risk(risk[0], floor), log_risk(risk, floor)[0])


def test_baselines_are_overlaps() -> None:
    settings = TargetSettings(horizon=16)
    found: list[dict[str, float]] = []
    again: list[dict[str, float]] = []
    frozen = Frozen(tiny_model(), None, 0)
    for into in (found, again):
        walk(
            frozen,
            READINGS,
            lambda views, into=into: into.extend(baseline_overlaps(view, settings, 0) for view in views),
        )
    assert found == again, "chance is drawn by key, not from a global generator"
    for overlaps in found:
        assert sorted(overlaps) == ["overlap_random", "overlap_recency", "overlap_value_norm"]
        assert all(0 <= value <= 1 for value in overlaps.values())
    assert len({overlaps["overlap_random"] for overlaps in found}) > 1


def test_settings_that_mean_nothing_are_refused_together() -> None:
    check_targets(TargetSettings())
    with pytest.raises(
        ValueError, match="sources is empty.*horizon=0.*block=0, target.repeat_chunk=0.*floor=0"
    ):
        check_targets(TargetSettings(sources={}, horizon=0, floor=0.0, block=0, repeat_chunk=0))
    strange = {"repeats": 1.0, "own": -1.0}
    with pytest.raises(
        ValueError, match="'repeats': did you mean 'repeat'.*sources.own=-1.0 must be positive"
    ):
        check_targets(TargetSettings(sources=strange))
    strange_names = TargetSettings()  # as they come where types are not checked
    for name, value in {"aggregate": "sum", "weight": "l1", "granularity": "heads"}.items():
        object.__setattr__(strange_names, name, value)
    message = (
        "unknown target.aggregate 'sum'.*target.weight 'l1'.*target.granularity 'heads': did you mean 'head'"
    )
    with pytest.raises(ValueError, match=message):
        check_targets(strange_names)
