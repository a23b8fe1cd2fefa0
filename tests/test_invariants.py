"""What every eviction owes, on every preset and every way to spread a budget; and where kept sets nest."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.statement import Budget
from retain.policy import decide_layers, shape_of
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score, masked_score
from retain.two_stage import FirstStage
from tests.evictions import (
    EVICTING,
    FIXED,
    VARIANTS,
    check,
    check_competition,
    learned_scores,
    made_scores,
    make_evidence,
    own_part,
    scored,
    small,
)
from tests.naive import random_evidence
from tests.test_cascade import made

# What every eviction owes.


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=4)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 4, 8]), st.sampled_from([25, 31]), st.sampled_from([0.5, 0.71])
)
def test_every_preset_keeps_its_budget_and_what_is_protected(heads_file, name, seed, group, tokens, ratio):
    layers, policy = make_evidence(seed, group, tokens, (0, 5, 2)), small(name, heads_file)
    scores = scored(policy, layers, [3, 4, 5], learned_scores(layers, seed))
    keeps = check(policy, layers, scores, Budget(keep_ratio=ratio))
    if policy.scope != "head":
        check_competition(policy, layers, scores, Budget(keep_ratio=ratio), keeps)
    for full in (Budget(keep_ratio=1.0), Budget(tokens_per_head=tokens)):
        for keep_BHT in check(policy, layers, scores, full):
            assert torch.equal(keep_BHT, layers[0].valid_BT[:, None].expand_as(keep_BHT))


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=3)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 8]), st.sampled_from([25, 31]))
def test_a_sequence_alone_keeps_what_it_keeps_in_a_padded_batch(heads_file, name, seed, group, tokens):
    layers, policy = make_evidence(seed, group, tokens, (0, 5, 2)), small(name, heads_file)
    learned = learned_scores(layers, seed)
    together = decide_layers(policy, layers, Budget(keep_ratio=0.5), learned=learned, seeds_B=[3, 4, 5])
    for b, pad in enumerate((0, 5, 2)):
        alone = decide_layers(
            policy,
            [own_part(layer, b) for layer in layers],
            Budget(keep_ratio=0.5),
            learned=[Score(own.values_BHT[b : b + 1, :, pad:], "risk") for own in learned],
            seeds_B=[3 + b],
        )
        for batch, own in zip(together, alone, strict=True):
            assert torch.equal(batch.keep_BHT[b, :, pad:], own.keep_BHT[0])
            assert torch.equal(batch.protected_BT[b, pad:], own.protected_BT[0])


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=2)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.5, 0.71]))
def test_every_way_to_spread_a_budget_keeps_it(name, seed, ties, ratio):
    policy = replace(VARIANTS[name], protection=Protection(2, 0.1, 0.1, 2, 4))
    layers = make_evidence(seed, 1, 19, (0, 3), num_layers=2)
    scores = made_scores(layers, seed, ties=ties)
    keeps = check(policy, layers, scores, Budget(keep_ratio=ratio))
    if policy.scope != "head":
        check_competition(policy, layers, scores, Budget(keep_ratio=ratio), keeps)
    for keep_BHT in check(policy, layers, scores, Budget(keep_ratio=1.0)):
        assert torch.equal(keep_BHT, layers[0].valid_BT[:, None].expand_as(keep_BHT))


# Where kept sets nest as the budget grows, and where they do not. Protection is the same at all budgets.


def _nests(policy: Policy) -> str | None:
    """`entries`: whatever the budget grows by. `tokens`: where it grows by whole tokens a head, since a first
    stage by mass and a guaranteed safeguard take whole ones. None: layers' shares are rounded anew, or a
    first stage by mass grows in heads that compete by what it ranks by, and pushes out what the score had."""
    own, stage = policy.allocation, policy.first_stage
    by_mass = stage is not None and stage.by != "budget"
    if own.layers != "uniform" or (by_mass and own.compete_by == "first"):
        return None
    return "tokens" if own.safeguard == "guaranteed" or by_mass else "entries"


def _check_nesting(policy: Policy, layers, scores, tokens: int, step: str | None) -> None:
    heads = sum(layer.num_heads for layer in layers)
    entry_bytes = shape_of(layers[0]).entry_bytes + policy.beside_bytes
    totals = range(tokens * heads, (tokens + 3) * heads + 1, heads if step == "tokens" else heads // 2 - 1)
    before = None
    for total in totals:
        decisions = decide_layers(policy, layers, Budget(bytes=total * entry_bytes), scores=scores)
        keeps = torch.stack([one.keep_BHT for one in decisions])
        assert keeps.sum((0, 2, 3)).tolist() == [total] * len(layers[0].valid_BT)
        assert before is None or not (before & ~keeps).any()
        before = keeps


@pytest.mark.parametrize("name", [name for name in VARIANTS if _nests(VARIANTS[name])])
@settings(deadline=None, max_examples=2)
@given(st.integers(0, 10**6), st.booleans(), st.integers(4, 9))
def test_kept_sets_nest_where_layers_get_the_same(name, seed, ties, tokens):
    """Two-stage selection, both safeguards and normalised scores among them."""
    policy = replace(VARIANTS[name], protection=FIXED)
    layers = make_evidence(seed, 1, 15, (0, 2), num_layers=2)
    _check_nesting(policy, layers, made_scores(layers, seed, ties=ties), tokens, _nests(policy))


def test_a_mass_stage_where_heads_compete_by_attention_does_not_nest():
    """Found by hypothesis: from 4 to 5 tokens a head."""
    policy = replace(VARIANTS["layer uniform weight None head mass first"], protection=FIXED)
    layers = make_evidence(334, 1, 15, (0, 2), num_layers=2)
    with pytest.raises(AssertionError):
        _check_nesting(policy, layers, made_scores(layers, 334, ties=False), 4, "tokens")


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=2)
@given(st.integers(0, 10**6), st.integers(8, 14))
def test_kept_sets_of_presets_nest(heads_file, name, seed, tokens):
    """Quest's too: a budget may end inside a page."""
    policy = replace(small(name, heads_file), protection=FIXED)
    assert (_nests(policy) is None) == (name in ("cake", "lava", "pyramidkv"))
    if _nests(policy):
        layers = make_evidence(seed, 4, 21, (0, 3))
        scores = scored(policy, layers, [3, 4], learned_scores(layers, seed))
        _check_nesting(policy, layers, scores, tokens, _nests(policy))


NOTHING = Protection(sinks=0, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=0)
FLAT = [[0.0] * 4]
BY_MASS = FirstStage("mass", 0.9)
# The smallest that a search found. Of each: the policy, scores and first-stage scores by layer and head, what
# the layers ask for, a budget in entries, and what each head holds at it and at one entry more.
COUNTEREXAMPLES = {
    # The first stage may take one entry more of both heads, and only one of them has more room.
    "a first stage by mass, at equal heads": (
        *(made("critical", first_stage=BY_MASS), [[[3, 0, 2], [4, 3, 3]]], [[[2, 3, 2], [4, 1, 4]]], [1]),
        *(3, [[2, 1]], [[2, 2]]),
    ),
    "a first stage by mass, where heads compete": (
        *(made("critical", "layer", first_stage=BY_MASS), [[[0, 1, 0], [0, 1, 2]]], [[[2, 1, 1], [1, 2, 2]]]),
        *([1], 3, [[2, 1]], [[2, 2]]),
    ),
    # Two heads are guaranteed an entry more each, and the third pays for one of them.
    "a guaranteed safeguard": (
        made("critical", "layer", safeguard="guaranteed", safeguard_share=0.5),
        *([[[9] * 9, [1] * 9, [1] * 9]], None, [1], 11, [[9, 1, 1]], [[8, 2, 2]]),
    ),
    # Largest remainder: 4/3, 10/3, 10/3 are 2, 3, 3, and 3/2, 15/4, 15/4 are 1, 4, 4.
    "CAKE's shares": (
        made("cake", "head", "cake"),
        *([FLAT] * 3, None, [2, 5, 5], 8, [[2], [3], [3]], [[1], [4], [4]]),
    ),
    # Rounded down, but one at least, shares are 1, 3, 2, and the first layer is given what is left; then they
    # are 1, 4, 3, and nothing is.
    "CAKE's shares as released": (
        made("cake", "head", "cake", spread="even"),
        *([FLAT] * 3, None, [1, 5, 4], 7, [[2], [3], [2]], [[1], [4], [3]]),
    ),
    # Entropies are log 2, log 5, log 5.
    "LAVa's shares": (
        made("lava", "head", "entropy"),
        *([[[1, 1, 0, 0, 0]], [[1] * 5], [[1] * 5]], None, [1, 1, 1], 8, [[2], [3], [3]], [[1], [4], [4]]),
    ),
    # The last layer has one entry. Beside it 3.27, 2.33, 1.4 are 3, 2, 2, and 3.73, 2.67, 1.6 are 4, 3, 1.
    "a pyramid": (
        made("snapkv", "head", "pyramid", beta=4.0),
        *([FLAT] * 4, None, [1, 1, 1, 1], 8, [[3], [2], [2], [1]], [[4], [3], [1], [1]]),
    ),
}


@pytest.mark.parametrize("kind", COUNTEREXAMPLES)
def test_kept_sets_do_not_nest(kind):
    policy, values, first, weights, total, smaller, larger = COUNTEREXAMPLES[kind]
    policy, layers, scores = replace(policy, protection=NOTHING), [], []
    for idx, (own, weight) in enumerate(zip(values, weights, strict=True)):
        heads, tokens = len(own), len(own[0])
        layer = random_evidence((0,), num_tokens=tokens, num_heads=heads, group=1)
        layers.append(replace(layer, layer_idx=idx))
        scores.append(
            masked_score(
                torch.tensor([own]).float(),
                layer.valid_BT,
                "risk",
                first_BHT=torch.tensor([own if first is None else first[idx]]).float(),
                layer_weight_B=torch.tensor([weight], dtype=torch.float64),
            )
        )
    keeps = []
    for entries, held in ((total, smaller), (total + 1, larger)):
        budget = Budget(bytes=entries * shape_of(layers[0]).entry_bytes)
        decisions = decide_layers(policy, layers, budget, scores=scores)
        assert [one.keep_BHT[0].sum(-1).tolist() for one in decisions] == held
        keeps.append(torch.stack([one.keep_BHT for one in decisions]))
    assert (keeps[0] & ~keeps[1]).any()
    assert _nests(policy) != "entries"
