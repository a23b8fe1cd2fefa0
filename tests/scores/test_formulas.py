"""Scores of all queries, of the last one, of keys or places against their formulas, in float64."""

import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize, pad

from retain.attention import received
from retain.attention.chunked import truncate
from retain.attention.received import advance_with_gaps
from retain.attention.rotary import Rotary
from retain.evidence import RunningStatistics
from retain.scores import (
    h2o,
    keydiff,
    keyformer,
    knorm,
    lagkv,
    lazy_eviction,
    lru,
    quest,
    random,
    recency,
    vatp,
)
from retain.scores.keyformer import advance_with_noise
from tests.close import assert_close
from tests.naive import (
    LAYERS,
    MASK,
    SHAPED,
    SHAPES,
    assert_heads_close,
    existing,
    left_of,
    masked,
    mixed,
    naive_attention,
    naive_gumbel,
    naive_scores,
    naive_state,
    random_evidence,
    shaped_evidence,
    special_layer,
)

shaped = pytest.mark.parametrize(("shape", "layer"), SHAPED)


def grouped(evidence):
    """Attention of all queries, `[B, H, G, S, T]`."""
    return naive_attention(evidence).unflatten(1, (evidence.num_heads, -1))


def naive_h2o(evidence, reduce="sum"):
    mass = grouped(evidence).sum(3).mean(2)
    if reduce == "mean":
        mass = mass / torch.arange(evidence.num_seen, 0, -1)
    return masked(mass, evidence)


def counted(evidence):
    """The same layer with the statistics that a cache would have counted, and the last query only."""
    mass = naive_h2o(evidence).masked_fill(~evidence.exists_BHT, 0.0).float()
    running = RunningStatistics(mass, torch.zeros(mass.shape, dtype=torch.int64))
    return replace(evidence, running=running, queries_BQSD=evidence.queries_BQSD[:, :, -1:])


@pytest.fixture(params=[received.ROW_NUMBERS, 150])
def few_rows(request, monkeypatch):
    """All rows of attention at once, or a few."""
    monkeypatch.setattr(received, "ROW_NUMBERS", request.param)


@shaped
def test_sums_over_all_queries_made_or_counted(shape, layer):
    evidence, _ = shaped_evidence(shape, layer, num_queries=None)
    other = special_layer(shaped_evidence(shape, num_queries=None, seed=1)[0], layer)
    size = evidence.values_BHTD.double().abs().sum(-1)
    kept = counted(evidence)
    for shown in (evidence, kept):
        for reduce in ("sum", "mean"):
            assert_heads_close(h2o(shown, reduce=reduce).values_BHT, naive_h2o(evidence, reduce))
        got = vatp(shown, attention="running")
        assert got.window == 0
        assert_heads_close(got.values_BHT, naive_h2o(evidence) * size)
    assert_heads_close(h2o(replace(other, running=kept.running)).values_BHT, naive_h2o(evidence))


def test_the_mean_counts_the_queries_of_evicted_entries():
    """Entries 3, 4 and 9 were evicted: what they asked is in the mass, and must be in the count."""
    whole = counted(random_evidence(pads=(0, 0)))
    left = [i for i in range(14) if i not in (3, 4, 9)]
    running = (whole.running.mass_BHT, whole.running.last_access_BHT)
    held = replace(left_of(whole, left), running=RunningStatistics(*(x[..., left] for x in running)))
    assert torch.equal(h2o(held, reduce="mean").values_BHT, h2o(whole, reduce="mean").values_BHT[..., left])


@pytest.mark.parametrize(
    ("group", "layer"), [(1, None), (4, None), (8, None), *((2, layer) for layer in (None, *LAYERS))]
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 3.0, 1e6])
def test_lru(group, layer, share):
    evidence = special_layer(random_evidence(pads=(0, 4, 9), num_tokens=17, group=group), layer)
    paid, places = grouped(evidence), evidence.places_BT
    seen = (paid > 0).sum(-1, keepdim=True).clamp_min(1)
    hit = (paid.amax(2) >= share / seen[:, :, 0]) & (paid[:, :, 0] > 0)
    last = torch.where(hit, places[:, None, :, None], -1).amax(2)
    wanted = masked(torch.maximum(last, places[:, None]), evidence).float()
    assert torch.equal(lru(evidence, share=share).values_BHT, wanted)


def test_indifferent_queries_access_everything_they_see():
    """Equal logits pay 1/n only up to rounding; which entries count must not depend on it."""
    evidence = random_evidence(pads=(0, 6), num_tokens=301)
    orders = torch.stack([torch.randperm(3) for _ in range(301)])
    keys = torch.tensor([0.1, 0.2, 0.7])[orders].expand(2, 2, 301, 3)
    queries = torch.full_like(evidence.queries_BQSD, 1.7)
    score = lru(replace(evidence, queries_BQSD=queries, keys_BHTD=keys)).values_BHT
    assert (score[0] == 300).all() and (score[1, :, 6:] == 294).all()


@pytest.mark.parametrize("tau", [1.0, 1.7])
@shaped
def test_keyformer_adds_up_a_softmax_with_gumbel_noise(tau, shape, layer, few_rows):
    evidence, _ = shaped_evidence(shape, layer, num_queries=None)
    attention = naive_attention(evidence)
    noise = torch.zeros_like(attention)
    for b, q in itertools.product(*map(range, attention.shape[:2])):
        entries = existing(evidence, b)
        for (later, j), (earlier, i) in itertools.product(enumerate(entries), enumerate(entries)):
            state = mixed((naive_state(5, 3, q) + later) & MASK)
            noise[b, q, j, i] = naive_gumbel(state + earlier)
    paid = ((attention.log() + noise) / tau).softmax(-1).nan_to_num(0.0)
    naive = paid.unflatten(1, (evidence.num_heads, -1)).sum(3).mean(2)
    assert_heads_close(keyformer(evidence, tau=tau, seed=5).values_BHT, masked(naive, evidence))


def test_keyformer_adds_to_what_a_cache_has_added_up():
    evidence = random_evidence(pads=(0, 4))
    whole, known = advance_with_noise(evidence), None
    for stop in (5, 6, 14):
        shown = truncate(evidence, stop)
        start = 0 if known is None else known.mass_BHT.shape[-1]
        if known is not None:
            sides = (known.mass_BHT, known.last_access_BHT)
            known = RunningStatistics(*(pad(side, (0, stop - start)) for side in sides))
        known = advance_with_noise(replace(shown, queries_BQSD=shown.queries_BQSD[:, :, start:]), known)
    valid = evidence.exists_BHT
    assert_close(known.mass_BHT[valid], whole.mass_BHT[valid])


@pytest.mark.parametrize("alpha", [1e-4, 0.1])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_lazy_eviction_by_the_time_since_the_last_access_and_the_longest_gap(alpha, shape, few_rows):
    evidence, _ = shaped_evidence(shape, num_queries=None)
    paid = grouped(evidence).amax(2)

    def number(b, h, i):
        payers = [j for j in existing(evidence, b) if float(paid[b, h, j, i]) >= alpha]
        gaps = [max(1, later - earlier) for earlier, later in itertools.pairwise([i, *payers])]
        gap, since = max(gaps, default=0), evidence.num_seen - 1 - max([i, *payers])
        # Beyond what exp takes nothing is left of a term.
        steady = 2 / (1 + math.exp(gap - 1)) if gap else 0.0
        due = 1 + since / (gap + 1e-5)
        return steady + (2 / (1 + math.exp(due)) if due < 700 else 0.0)

    assert_heads_close(lazy_eviction(evidence, alpha=alpha).values_BHT, naive_scores(evidence, number))
    counts = replace(evidence, running=advance_with_gaps(evidence, alpha=alpha))
    last = replace(counts, queries_BQSD=evidence.queries_BQSD[:, :, -1:])
    assert torch.equal(lazy_eviction(last).values_BHT, lazy_eviction(evidence, alpha=alpha).values_BHT)


# Scores of keys, of the last query, of places.


@pytest.mark.parametrize("group", [1, 4, 8])
def test_keydiff(group):
    evidence = random_evidence(pads=(0, 4, 9), num_tokens=17, group=group)
    unit = normalize(evidence.keys_BHTD.double(), dim=-1)
    middle = normalize((unit * evidence.valid_BT[:, None, :, None]).sum(2, keepdim=True), dim=-1)
    assert_heads_close(keydiff(evidence).values_BHT, masked(-(unit * middle).sum(-1), evidence))
    evidence.keys_BHTD[0, 0, 6] = 0.0  # a key of no direction is neither like nor unlike
    score = keydiff(evidence).values_BHT[0, 0]
    assert score[6] == 0 and score.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_knorm_whatever_the_positions(dtype):
    evidence = random_evidence(pads=(0, 4, 9), num_tokens=17, head_width=4, dtype=dtype)
    naive = masked(-evidence.keys_BHTD.double().square().sum(-1).sqrt(), evidence)
    assert_heads_close(knorm(evidence).values_BHT, naive)
    if dtype == torch.float32:
        turned = Rotary(torch.tensor([1.0, 0.1])).unrotate(evidence.keys_BHTD, evidence.positions_BT)
        assert_heads_close(knorm(replace(evidence, keys_BHTD=turned)).values_BHT, naive)


def spread_in_next(block, following):
    """LagKV's: softmax over a block of the deviation over channels, within the next block's range."""
    spread = []
    for state in block:
        low = [min(column) for column in zip(*following, strict=True)]
        high = [max(column) for column in zip(*following, strict=True)]
        within = [(x - a) / (b - a) for x, a, b in zip(state, low, high, strict=True) if b > a]
        spread.append(statistics.stdev(within) if len(within) > 1 else 0.0)
    total = sum(math.exp(x) for x in spread)
    return [math.exp(x) / total for x in spread]


@pytest.mark.parametrize(("lag", "sinks"), [(2, 0), (3, 4), (5, 1), (8, 0), (9, 0), (40, 2)])
def test_lagkv_compares_each_block_with_the_next(lag, sinks):
    """17 entries: two whole blocks of 8, or one of 9 and no comparison; the short sequence has fewer."""
    evidence = random_evidence(pads=(0, 4, 9), num_tokens=17, group=2)
    got = lagkv(evidence, lag=lag, sinks=sinks).values_BHT
    naive = torch.full(got.shape, float("-inf"), dtype=torch.float64)
    for b, h in itertools.product(range(3), range(2)):
        entries = existing(evidence, b)
        naive[b, h, entries] = 1.0
        naive[b, h, entries[:sinks]] = 2.0
        blocks = [entries[i : i + lag] for i in range(sinks, len(entries) - lag + 1, lag)]
        for block, following in itertools.pairwise(blocks):
            of_keys, of_values = (
                spread_in_next(states[b, h, block].tolist(), states[b, h, following].tolist())
                for states in (evidence.keys_BHTD.double(), evidence.values_BHTD.double())
            )
            score = [(k + v) / 2 for k, v in zip(of_keys, of_values, strict=True)]
            score = [sum(other < one for other in score) / lag for one in score]
            naive[b, h, block] = torch.tensor(score, dtype=torch.float64)
    assert_heads_close(got, naive)
    assert (got == 1).any() and ((got == 2).any() == (sinks > 0))


def test_a_channel_that_does_not_vary_says_nothing_in_lagkv():
    evidence = random_evidence(pads=(0,), num_tokens=12, num_heads=1)
    evidence.keys_BHTD[0, 0, 4:8, 0] = 0.5  # of the block that the first is compared with
    evidence.values_BHTD[0, 0, 4:8] = 0.5
    score = lagkv(evidence, lag=4, sinks=0).values_BHT[0, 0]
    of_keys = spread_in_next(*(evidence.keys_BHTD[0, 0, a : a + 4, 1:].double().tolist() for a in (0, 4)))
    assert torch.equal(score[:4], torch.tensor(of_keys).argsort().argsort() / 4)


def naive_quest(evidence, page_size):
    query = evidence.queries_BQSD[:, :, -1].double().unflatten(1, (evidence.num_heads, -1))
    score = torch.zeros(evidence.keys_BHTD.shape[:3], dtype=torch.float64)
    for b in range(len(score)):
        entries = existing(evidence, b)
        for start in range(0, len(entries), page_size):
            page = entries[start : start + page_size]
            keys = evidence.keys_BHTD[b, :, page].double()  # [H, page, D]
            bound = torch.maximum(query[b] * keys.amax(1)[:, None], query[b] * keys.amin(1)[:, None])
            score[b, :, page] = bound.sum(-1).amax(-1)[:, None]
    return masked(score, evidence)


@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("page_size", [1, 3, 16, 40])
def test_quest_reads_the_last_query_only(heads, page_size):
    evidence = random_evidence(pads=(0, 4, 17), num_tokens=35, group=heads)
    score = quest(evidence, page_size=page_size).values_BHT
    assert_heads_close(score, naive_quest(evidence, page_size))
    last = replace(evidence, queries_BQSD=evidence.queries_BQSD[:, :, -1:])
    assert torch.equal(quest(last, page_size=page_size).values_BHT, score)


@pytest.mark.parametrize("seeds", [None, [0, 1], [-5, 2**63 + 17]])
def test_random(seeds):
    """Without seeds rows are counted."""
    evidence = random_evidence(pads=(0, 4))

    def number(b, h, i):
        state = naive_state((seeds or [0, 1])[b], 3, h)
        return (mixed((state + i - (0, 4)[b]) & MASK) >> 40) / 2**24

    score = random(evidence, seeds_B=seeds).values_BHT
    assert score.tolist() == naive_scores(evidence, number).tolist()
    with pytest.raises(ValueError, match="one seed a sequence: got 3 seeds for 2 sequences"):
        random(evidence, seeds_B=[1, 2, 3])


def test_recency_is_the_place_among_the_valid_entries():
    evidence = random_evidence(pads=(0, 4))
    naive = naive_scores(evidence, lambda b, h, i: int(evidence.valid_BT[b, :i].sum()))
    assert recency(evidence).values_BHT.tolist() == naive.tolist()
