"""A share of a budget that is drawn by lot: its keys, that sums come out right in the mean, and that nothing
but the entry, its weight and the seed decides who is drawn."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from retain.budget.joint import allocate_joint, make_bids
from retain.budget.statement import Budget
from retain.policy import decide_layers, score_entries
from retain.scores import SCORES, masked_score
from retain.scores.random import draw_keys
from tests.evictions import (
    learned_scores,
    made,
    make_evidence,
)
from tests.naive import random_evidence
from tests.refused import refused

HALF = Budget(keep_ratio=0.5)


def drawn(**settings):
    """A policy of which a share is drawn."""
    risk = {"observed": "observed_risk", "observed_settings": {"window": 4}}
    return made(**{"scope": "model", "draw": {"share": 0.3}, **risk, **settings})


def test_keys_are_weights_over_numbers_drawn():
    (layer,) = make_evidence(0, 1, 14, (0, 5), num_layers=1)
    weight = learned_scores([layer], 3)[0]
    for seeds in (None, [4, 9], torch.tensor([4, 9])):
        keys = draw_keys(weight, layer, seeds)
        lots = SCORES["random"].function(layer, seeds_B=[0, 0] if seeds is None else [4, 9]).values_BHT
        for b in range(2):
            for h in range(2):
                for i in range(14):
                    w, r = float(weight.values_BHT[b, h, i]), float(lots[b, h, i])
                    wanted = w / (1 - r) if layer.valid_BT[b, i] else float("-inf")
                    assert float(keys[b, h, i]) == pytest.approx(wanted, rel=1e-6)
        assert keys.dtype == torch.float32
    # Never less than the weight; what weighs nothing has the lowest key that an entry can have.
    assert (draw_keys(weight, layer) >= weight.values_BHT).all()
    nothing = masked_score(torch.zeros(2, 2, 14), layer.valid_BT, "mass")
    assert draw_keys(nothing, layer).unique().tolist() == [float("-inf"), 0.0]


def test_sums_over_what_was_drawn_are_right_in_the_mean():
    """Priority sampling: with tau the largest key that went, `max(w, tau)` over the drawn ones of any subset
    has the subset's sum as its mean. 4,000 draws of 8 of 30, from weights of which one has a fifth of all."""
    num, entries, drawn = 2000, 15, 8
    layer = random_evidence((0,) * num, num_tokens=entries, num_heads=2, group=1, head_width=1)
    w_HT = torch.arange(1, 31).view(2, entries).double() ** -0.9
    weight = masked_score(w_HT.expand(num, -1, -1), layer.valid_BT, "mass")
    estimates = []
    for layer_idx in (0, 1):
        each = replace(layer, layer_idx=layer_idx)
        keys = draw_keys(weight, each, list(range(num)))
        flat_BHT = torch.zeros_like(keys)
        bids, _ = make_bids(
            flat_BHT, layer.exists_BHT, torch.zeros_like(layer.exists_BHT), [0] * num, None, keys
        )
        (won,) = allocate_joint([bids], [drawn] * num, 1.0)
        chosen = won.won_N.view(num, 2, entries)
        assert (chosen.sum((1, 2)) == drawn).all()
        tau = keys.masked_fill(chosen, 0.0).amax((1, 2))[:, None, None].double()
        assert (keys >= tau).eq(chosen).float().mean() > 0.96  # and tau itself
        estimates.append(torch.where(chosen, torch.maximum(w_HT, tau), 0.0))
    mean, spread = torch.cat(estimates).mean(0), torch.cat(estimates).std(0) / (2 * num) ** 0.5
    # Each entry, thirty at once; then all, each head, and every third entry.
    assert ((mean - w_HT).abs() <= 4 * spread + 1e-9).all()
    assert (spread > 0).sum() >= 29  # the largest is drawn almost always
    third = (torch.arange(30).view(2, entries) % 3 == 0).double()
    for subset in (torch.ones(2, entries), third, torch.tensor([[1.0], [0.0]]).expand(2, entries)):
        sums = (torch.cat(estimates) * subset).sum((1, 2))
        error = float(sums.std() / len(sums) ** 0.5)
        assert abs(float(sums.mean() - (w_HT * subset).sum())) <= 3 * error
        assert error < 0.02 * float((w_HT * subset).sum())


def test_weights_of_which_no_share_can_be_drawn_are_refused():
    (layer,) = make_evidence(0, 1, 10, (0, 3), num_layers=1)
    weight = learned_scores([layer], 0)[0]
    said = "goes in proportion to numbers, and .* in 'rank'.*risk or mass"
    refused(said, draw_keys, replace(weight, unit="rank"), layer)
    refused("one seed a sequence: got 1 seeds for 2", draw_keys, weight, layer, [1])


def test_it_is_drawn_by_what_was_observed_and_by_the_gate_where_nothing_was():
    layers = make_evidence(0, 2, 12, (0, 2))
    seen, learned = learned_scores(layers, 0), learned_scores(layers, 1)
    for layer, each, gate in zip(layers, seen, learned, strict=True):
        for fusion in ("max", "sum", "learned", "rank_blend"):
            policy = drawn(learned=True, fusion=fusion)
            score = score_entries(policy, layer, observed=each, learned=gate, seeds_B=[7, 8])
            assert torch.equal(score.draw_BHT, draw_keys(each, layer, [7, 8]))
            plain = made(scope="model", learned=True, fusion=fusion)
            plain_score = score_entries(plain, layer, observed=each, learned=gate)
            assert torch.equal(score.values_BHT, plain_score.values_BHT) and plain_score.draw_BHT is None
        alone = drawn(observed=None, learned=True, observed_settings={})
        assert torch.equal(score_entries(alone, layer, learned=gate).draw_BHT, draw_keys(gate, layer))
    # A weight is asked to be a number though the score does not read it.
    seen[1].values_BHT[1, 0, 7] = float("nan")
    both = {"observed": seen, "learned": learned}
    assert decide_layers(made(scope="model", learned=True, fusion="learned"), layers, HALF, **both)
    refused(
        "the score of sequence 1, head 0, entry 7 is NaN",
        decide_layers, drawn(learned=True, fusion="learned"), layers, HALF, **both,
    )  # fmt: skip
    said = "'own' draws a share.*nothing to draw by.*score_entries.*draw null"
    refused(said, decide_layers, drawn(), layers, HALF, scores=learned)


CANNOT: list[tuple[str, dict[str, Any]]] = [
    ("draw: input should be null", {"scope": "head"}),
    ("one stage by score: take first_stage null", {"first_stage": {"by": "budget"}}),
    ("draw stands beside one stage by score", {"allocation": {"compete_by": "first"}}),
    ("draw wants numbers, and 'keydiff' is in 'rank'", {"observed": "keydiff"}),
    ("draw.share: input should be less than or equal to 1, got 1.5", {"draw": {"share": 1.5}}),
]


@pytest.mark.parametrize(("said", "changes"), CANNOT)
def test_policies_that_cannot_be_meant_are_refused(said, changes):
    drawn = {"scope": "model", "draw": {"share": 0.2}}
    assert made(**drawn) and ("draw" in changes or made(**{"scope": "model", **changes}))
    refused(said, made, **{**drawn, **changes})
