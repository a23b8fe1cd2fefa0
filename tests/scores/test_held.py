"""Scores of a later eviction, when heads hold different entries: those of other heads reach nothing."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from retain.scores import SCORES, random, recency, tova
from retain.scores.window import pool_entries
from tests.held import ASKED, compacted, filled, held_evidence, naive_held_attention
from tests.naive import LAYERS, assert_heads_close, left_of, random_evidence, special_layer
from tests.scores.test_scores import IN_LAYERS, VARIANTS, WINDOW, both, score_of

# Scores of which a head's own entries are all that matters, under these settings.
LOCAL = [
    ("cake", {}),
    ("cake", {"pool": None}),
    ("critical", {}),
    ("critical", {"pool": "max"}),
    ("defensive", {}),
    ("defensive", {"pool": "max", "norm": "token_sum"}),
    ("defensive", {"pool": None}),
    ("expected_attention", {}),
    ("expected_attention", {"value_norm": "output"}),
    ("h2o", {}),
    ("h2o", {"reduce": "mean"}),
    ("keydiff", {}),
    ("keyformer", {}),
    ("knorm", {}),
    ("lagkv", {"lag": 2, "sinks": 1}),
    ("lava", {}),
    ("lava", {"pool": None, "value_max_over": "all"}),
    ("lazy_eviction", {}),
    ("lru", {}),
    ("observed_risk", {}),
    ("quest", {"page_size": 3}),
    ("recency", {}),
    ("snapkv", {}),
    ("snapkv", {"pool": "max", "pool_size": 7}),
    ("snapkv", {"pool": None}),
    ("triattention", {"furthest": 20}),
    ("vatp", {}),
    ("vatp", {"attention": "running"}),
]
# The others look at other heads, or at the head's number.
OTHERS = {"random", "tova"}


def test_every_score_is_local_somehow_or_known_not_to_be():
    assert {name for name, _ in LOCAL} | OTHERS == set(SCORES)


@pytest.mark.parametrize(
    ("name", "settings", "layer"),
    [
        (name, settings, layer)
        for (name, settings), layer in itertools.product(LOCAL, (None, *LAYERS))
        if (name, layer) != ("expected_attention", "soft_cap")  # refused
    ],
)
def test_a_head_scores_what_it_holds_as_if_that_were_all(name, settings, layer):
    evidence = special_layer(held_evidence(seed=3), layer)
    assert ((evidence.exists_BHT.sum(-1) < evidence.valid_BT.sum(-1, keepdim=True)).all(-1)).all()
    score = score_of(filled(evidence, float("nan")), name, settings)
    for b, h in itertools.product(range(3), range(2)):
        one, left = compacted(evidence, b, h)
        alone = score_of(one, name, settings)
        assert (alone.unit, alone.window) == (score.unit, score.window)
        for together, single in zip(both(score), both(alone), strict=True):
            assert_heads_close(together[b : b + 1, h : h + 1, left], single.double(), ops=4)


@pytest.mark.parametrize(("name", "settings", "layer"), IN_LAYERS)
@pytest.mark.parametrize("kept", [True, False])
def test_poison_in_what_is_not_held_reaches_nothing(name, settings, layer, kept):
    """Keys, values, norms, masses; a head that holds nothing, and queries whose own entry was evicted."""
    evidence = held_evidence(seed=5, latest=kept)
    evidence = special_layer(evidence, layer)
    clean = score_of(filled(evidence, 0.0), name, settings)
    exists = evidence.exists_BHT
    for values in both(clean):
        assert torch.equal(values > float("-inf"), exists)
        assert values[exists].isfinite().all()
    for poison in (float("nan"), float("inf"), -float("inf"), 1e30):
        score = score_of(filled(evidence, poison), name, settings)
        for poisoned, values in zip(both(score), both(clean), strict=True):
            assert torch.equal(poisoned, values)
        if clean.layer_weight_B is not None:
            assert clean.layer_weight_B.isfinite().all()
            assert torch.equal(score.layer_weight_B, clean.layer_weight_B)


def test_tova_is_the_mean_over_the_heads_that_hold_the_entry():
    evidence = held_evidence(latest=False)
    paid = naive_held_attention(evidence)[:, :, -1]
    score = tova(filled(evidence, float("nan"))).values_BHT
    for b, h, i in itertools.product(range(3), range(2), range(20)):
        holders = [q for q in range(4) if evidence.exists_BHT[b, q // 2, i]]
        want = sum(float(paid[b, q, i]) for q in holders) / len(holders) if holders else 0.0
        assert math.isclose(score[b, h, i], want if h * 2 in holders else -math.inf, rel_tol=1e-6)


@pytest.mark.parametrize("score", [random, recency])
def test_an_entry_has_the_same_number_at_every_eviction(score):
    whole = random_evidence((0, 6), num_tokens=25)
    before = score(whole).values_BHT
    for left in ([3, 7, 8, 12, 13, 20, 24], list(range(10, 25)), [24]):
        assert torch.equal(score(left_of(whole, left)).values_BHT, before[..., left])


def test_an_entry_stays_in_its_page_while_others_go():
    """Pages of four places; of the first one entry is left, of the third none."""
    evidence = held_evidence((0,), num_tokens=ASKED + 5)
    place_BT = torch.tensor([[2, 4, 5, 7, 12, *range(13, 21)]])
    held_BHT = torch.ones(1, 2, 13, dtype=torch.bool)
    evidence = replace(evidence, place_BT=place_BT, held_BHT=held_BHT)
    score = score_of(evidence, "quest", {"page_size": 4}).values_BHT[0, 0].tolist()
    pages = [score[:1], score[1:4], score[4:8], score[8:12], score[12:]]
    assert [len(set(page)) for page in pages] == [1] * 5
    assert len(set(score)) == 5
    last = evidence.queries_BQSD[0, :2, -1]
    assert math.isclose(score[0], (last @ evidence.keys_BHTD[0, 0, 0]).max(), rel_tol=1e-6)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_a_score_reads_what_it_says_and_nothing_else(name, settings):
    settings = settings if name != "lagkv" else {"lag": 2, "sinks": 1}
    evidence, declared = held_evidence(seed=11), SCORES[name].under(settings)
    says, score = {*declared.needs, *declared.reads}, score_of(evidence, name, settings)
    last = {"queries_BQSD": evidence.queries_BQSD[:, :, -max(1, score.window) :]}
    running = evidence.running
    others = {"mass_BHT": running.mass_BHT * torch.nan, "last_access_BHT": running.last_access_BHT + 1}
    fields = {"keys": "keys_BHTD", "values": "values_BHTD", "window queries": "queries_BQSD"}
    fields |= {"value_norm": "value_norm_BQT", "output_weight": "output_weight_QDE"}
    without = {what: {name: getattr(evidence, name) * torch.nan} for what, name in fields.items()}
    without |= {"running": {"running": replace(running, **others)}, "rotary": {"rotary": None}}
    if "queries" not in says:
        without["earlier ones"] = last
    for what, changes in without.items():
        poor = replace(evidence, **changes)
        if says.isdisjoint(what.split()[:2]):
            assert all(map(torch.equal, both(score_of(poor, name, settings)), both(score))), what
        elif what != "rotary":
            assert not torch.equal(score_of(poor, name, settings).values_BHT, score.values_BHT), what
    if "queries" in says:
        fewer = score_of(replace(evidence, **last), name, settings)
        assert not torch.equal(fewer.values_BHT, score.values_BHT)
        assert fewer.values_BHT[evidence.exists_BHT].isfinite().all()


def test_expected_attention_learns_from_the_queries_that_came():
    """Slots that a sequence has no query for count for nothing, and one query is enough."""
    evidence = held_evidence()
    queried = torch.arange(ASKED) >= torch.tensor([[3], [5], [7]])
    few = replace(
        evidence,
        queried_BS=queried,
        queries_BQSD=evidence.queries_BQSD.masked_fill(~queried[:, None, :, None], float("nan")),
    )
    score = score_of(few, "expected_attention", {}).values_BHT
    for b, start in enumerate((3, 5, 7)):
        one = evidence.select_batch(slice(b, b + 1))
        alone = score_of(replace(one, queries_BQSD=one.queries_BQSD[:, :, start:]), "expected_attention", {})
        assert_heads_close(score[b : b + 1], alone.values_BHT.double())
    none = replace(evidence, queried_BS=torch.arange(ASKED) >= torch.tensor([[3], [5], [8]]))
    with pytest.raises(ValueError, match="sequence 2 of 3.*no query is left"):
        score_of(none, "expected_attention", {})


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_which_columns_are_shown_changes_no_pool(kind, size, dtype):
    """Bit for bit: all tokens, those that somebody holds, and the places left out altogether."""
    draw = torch.Generator().manual_seed(size)
    paid = torch.rand(3, 2, 4, 30, generator=draw, dtype=dtype)
    held_BT = torch.rand(3, 30, generator=draw) < 0.4
    held_BT[:, -WINDOW:] = True
    paid = paid.masked_fill(~held_BT[:, None, None], 0.0)
    place_BT = torch.arange(30).expand(3, 30)
    pooled = pool_entries(paid, kind, size, window=WINDOW, place_BT=place_BT)
    assert torch.equal(pooled, pool_entries(paid, kind, size, window=WINDOW))
    for b in range(3):
        held = held_BT[b].nonzero().flatten()
        shown = paid[b : b + 1, ..., held]
        alone = pool_entries(shown, kind, size, window=WINDOW, place_BT=held[None])
        assert torch.equal(alone, pooled[b : b + 1, ..., held])
