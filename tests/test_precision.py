"""Precision: which entries stay as they are, what queries say of channels, what it costs; against loops."""

import math
from fractions import Fraction

import pytest
import torch

from retain.budget.statement import Budget
from retain.cache.store import RaggedStore
from retain.cache.tiered_store import Rows, TieredStore
from retain.policy import decide_layers, load_policy, shape_of
from retain.precision import Precision, balance_of, channels_of, full_masks
from retain.presets import Policy
from tests.close import assert_close
from tests.evictions import EVICTING, make_evidence, small
from tests.naive import query_heads, random_evidence
from tests.refused import refused


def drawn(seed, layers=3, batch=2, heads=2, num=12):
    """Keep masks, scores with ties, what comes first, and weights of layers; one row keeps nothing."""
    draw = torch.Generator().manual_seed(seed)
    keeps, ranked, first = [], [], []
    for idx in range(layers):
        shape = batch, heads + idx % 2, num
        keeps.append(torch.rand(shape, generator=draw) < 0.2 + 0.3 * idx)
        ranked.append((torch.rand(shape, generator=draw) * 4).floor())
        first.append(torch.rand(shape, generator=draw) < 0.1)
    keeps[0][0, 1] = False
    weights = [
        [Fraction(int(own), 7) for own in torch.randint(0, 9, (batch,), generator=draw)] for _ in keeps
    ]
    return keeps, ranked, first, weights


def rounded(total, shares, capacity):
    """Largest remainder by loops: whole parts, then the largest remainders, the first of equal ones, and what
    is beyond a capacity goes to the others in the same way."""
    got, left = [0] * len(shares), total
    open_ = [i for i, own in enumerate(capacity) if own > 0]
    while left and open_:
        weight = sum(shares[i] for i in open_) or None
        parts = {i: left * shares[i] / weight if weight else Fraction(left, len(open_)) for i in open_}
        over = [i for i in open_ if parts[i] >= capacity[i] - got[i]]
        if over:
            for i in over:
                left -= capacity[i] - got[i]
                got[i] = capacity[i]
            open_ = [i for i in open_ if i not in over]
            continue
        order = sorted(open_, key=lambda i: (-(parts[i] - math.floor(parts[i])), i))
        rest = left - sum(math.floor(parts[i]) for i in open_)
        for i in open_:
            got[i] += math.floor(parts[i]) + (order.index(i) < rest)
        left = 0
    return got


def best_of(keep, score, first, count):
    """Numbers of the best of one head."""
    held = [i for i in range(len(keep)) if keep[i]]
    held.sort(key=lambda i: (-int(first[i]), -float(score[i]), -i))
    return set(held[:count])


@pytest.mark.parametrize("layers", ["uniform", "preference"])
@pytest.mark.parametrize("full", [0.1, 0.3, 0.75])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_what_is_kept_stay_whole(layers, full, seed):
    keeps, ranked, first, weights = drawn(seed)
    precision = Precision(bits=4, full=full, full_layers=layers)
    given = weights if layers == "preference" else [None] * len(keeps)
    fulls = full_masks(precision, keeps, ranked, first, given)
    share = Fraction(str(full))
    for b in range(2):
        counts = [int(keep[b].sum()) for keep in keeps]
        if layers == "uniform":
            wanted = [math.floor(share * count) for count in counts]
        else:
            parts = [count * own[b] for count, own in zip(counts, weights, strict=True)]
            wanted = rounded(math.floor(share * sum(counts)), parts, counts)
        for layer, total in enumerate(wanted):
            of_heads = [int(own.sum()) for own in keeps[layer][b]]
            per_head = rounded(total, [Fraction(own) for own in of_heads], of_heads)
            for h, count in enumerate(per_head):
                own = [side[layer][b, h].tolist() for side in (keeps, ranked, first)]
                assert {i for i, one in enumerate(fulls[layer][b, h].tolist()) if one} == best_of(*own, count)
            assert int(fulls[layer][b].sum()) == total
    assert all(bool((full <= keep).all()) for full, keep in zip(fulls, keeps, strict=True))


def test_layers_without_any_weight_share_alike():
    keeps, ranked, first, weights = drawn(0)
    precision = Precision(bits=4, full=0.5, full_layers="preference")
    nothing = [[Fraction(0)] * 2 for _ in keeps]
    ones = [[Fraction(1)] * 2 for _ in keeps]
    got, want = (full_masks(precision, keeps, ranked, first, own) for own in (nothing, ones))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_of_equal_scores_the_later_stay():
    keep, score, first = torch.ones(1, 1, 6).bool(), torch.zeros(1, 1, 6), torch.zeros(1, 1, 6).bool()
    first[0, 0, 1] = True
    (full,) = full_masks(Precision(bits=4, full=0.5), [keep], [score], [first], [None])
    assert full[0, 0].tolist() == [False, True, False, False, True, True]


EVIDENCE = {
    "plain": {},
    "group of 3": {"group": 3, "num_heads": 3},
    "a few queries": {"num_queries": 5},
}
every_evidence = pytest.mark.parametrize("name", EVIDENCE)


def made(name, seed=1):
    return random_evidence((0, 4), head_width=6, seed=seed, **EVIDENCE[name])


@every_evidence
def test_balance_is_what_loops_say(name):
    evidence = made(name)
    evidence.keys_BHTD[0, 1, :, 2] = 0
    evidence.keys_BHTD[1, 0, :, 3] = 1e-12
    B, H, T, D = evidence.keys_BHTD.shape
    S = evidence.queries_BQSD.shape[2]
    wanted = torch.ones(B * H, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for c in range(D):
                own = [i for i in range(T) if evidence.valid_BT[b, i]]
                keys = max(abs(float(evidence.keys_BHTD[b, h, i, c])) for i in own)
                queries = max(
                    abs(float(evidence.queries_BQSD[b, q, s, c]))
                    for q in query_heads(evidence, h)
                    for s in range(S)
                    if evidence.valid_BT[b, T - S + s]
                )
                if keys > 0 and queries > 0:
                    wanted[b * H + h, c] = min(max(math.sqrt(queries / keys), 1e-4), 1e4)
    got = balance_of(evidence)
    assert_close(got, wanted)
    assert float(got[1, 2]) == 1.0 and float(got[H, 3]) == 1e4


def ranked(score, head=None):
    """Pairs of head and channel, the largest score first; of one head, or of all."""
    return sorted((pair for pair in score if head in (None, pair[0])), key=lambda pair: -score[pair])


@pytest.mark.parametrize("heads", ["equal", "layer"])
@every_evidence
def test_channels_are_what_loops_say(name, heads):
    evidence = made(name)
    B, H, T, D = evidence.keys_BHTD.shape
    S = evidence.queries_BQSD.shape[2]
    precision = Precision(channels=0.6, channel_heads=heads)
    keep = torch.rand(B, H, T, generator=torch.Generator().manual_seed(2)) < 0.6
    got = channels_of(evidence, precision, keep, window=4)
    width = 4  # 0.6 * 6 = 3.6
    for b in range(B):
        score = {}
        for h in range(H):
            for c in range(D):
                queries = sum(
                    float(evidence.queries_BQSD[b, q, s, c]) ** 2
                    for q in query_heads(evidence, h)
                    for s in range(max(0, S - 4), S)
                    if evidence.valid_BT[b, T - S + s]
                )
                keys = sum(
                    float(evidence.keys_BHTD[b, h, i, c]) ** 2
                    for i in range(T)
                    if keep[b, h, i] and evidence.valid_BT[b, i]
                )
                score[h, c] = math.sqrt(queries) * math.sqrt(keys)
        if heads == "equal":
            wanted = [sorted(c for _, c in ranked(score, h)[:width]) for h in range(H)]
        else:
            firsts = [ranked(score, h)[0] for h in range(H)]
            order = firsts + [pair for pair in ranked(score) if pair not in firsts]
            wanted = [sorted(c for h, c in order[: H * width] if h == own) for own in range(H)]
        assert [own.nonzero()[:, 0].tolist() for own in got[b * H : b * H + H]] == wanted
    if heads == "layer":
        assert len(got.sum(-1).unique()) > 1, "widths must differ"


def test_a_head_that_nobody_asks_holds_one_channel():
    evidence = made("plain")
    evidence.keys_BHTD[:, 0] *= 1e-9
    precision = Precision(channels=0.5, channel_heads="layer")
    widths = channels_of(evidence, precision, evidence.exists_BHT).sum(-1).tolist()
    assert widths == [1, 5, 1, 5]


COSTS = {
    "8 bits": {"bits": 8},
    "4 bits, a group of 5": {"bits": 4, "group": 5},
    "2 bits": {"bits": 2},
    "by token": {"bits": 4, "keys": "token", "group": 7},
    "channels by layer, by token": {
        "channels": 0.6,
        "channel_heads": "layer",
        "bits": 2,
        "keys": "token",
        "group": 5,
    },
    "balanced": {"bits": 2, "keys": "token", "balance": True},
    "channels": {"channels": 0.6},
    "channels in 4 bits": {"channels": 0.6, "bits": 4},
    "channels by layer": {"channels": 0.6, "channel_heads": "layer"},
    "channels by layer in 4 bits": {"channels": 0.6, "bits": 4, "channel_heads": "layer"},
    "full": {"bits": 4, "full": 0.25},
    "full, balanced, by token": {"bits": 2, "full": 0.4, "keys": "token", "balance": True},
    "no recent": {"bits": 4, "recent": 0},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [9, 40, 41])
@pytest.mark.parametrize("name", COSTS)
def test_cost_is_that_of_a_store(name, length, dtype):
    """Never less than a store holds, and at most one group a head more."""
    precision = Precision(**{"group": 8, "recent": 4, **COSTS[name]})
    D, V, H = 16, 16, 4
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, H, length, D, generator=draw).to(dtype)
    values = torch.randn(1, H, length, V, generator=draw).to(dtype)
    exists = torch.ones(1, H, length, dtype=torch.bool)
    channels = None
    if precision.channels < 1:
        widths = [precision.width(D)] * H
        if precision.channel_heads == "layer":
            widths = [width + more for width, more in zip(widths, (-5, 2, 0, 3), strict=True)]
        channels = torch.arange(D) < torch.tensor(widths)[:, None]
    rows = Rows(torch.ones(H, D) if precision.balance else None, channels)
    store = TieredStore(
        RaggedStore.from_dense(keys, values, torch.arange(length)[None], exists), precision, rows
    )
    full_N = None
    if precision.full:
        score = [torch.rand(1, H, length, generator=draw)]
        (full,) = full_masks(precision, [exists], score, [torch.zeros_like(exists)], [None])
        full_N = full[exists]
    store.pack_(full_N)
    each, head = precision.cost(D, V, dtype.itemsize)
    most = H * (length * each + head)
    assert store.bytes_held <= most
    whole = (D + V) * dtype.itemsize
    # A group that is not full, and an entry that is full or not by rounding.
    slack = 4 * D + 8 * whole / 8
    assert store.bytes_held >= most - H * slack
    assert store.bytes_held < H * length * whole or length == 9


@pytest.mark.parametrize("ratio", [0.37, 0.5])
@pytest.mark.parametrize("name", [name for name in EVICTING if not load_policy(name).learned])
def test_a_byte_ratio_without_precision_is_so_many_bytes(name, ratio, heads_file):
    policy, layers = small(name, heads_file), make_evidence(1, 2, 31, (0,))
    shape = shape_of(layers[0])
    stated = int(Fraction(str(ratio)) * len(layers) * shape.num_heads * 31 * shape.entry_bytes)
    want, got = (
        decide_layers(policy, layers, budget, seeds_B=(1,))
        for budget in (Budget(bytes=stated), Budget(byte_ratio=ratio))
    )
    assert all(torch.equal(a.keep_BHT, b.keep_BHT) for a, b in zip(want, got, strict=True))
    assert sum(int(one.keep_BHT.sum()) for one in got) * (shape.entry_bytes + policy.beside_bytes) <= stated
    assert any(bool((~one.keep_BHT & own.exists_BHT).any()) for one, own in zip(got, layers, strict=True))


def test_settings_that_make_no_sense_are_refused():
    refused("nothing is made smaller", Precision)
    refused("nothing is made smaller", Precision, full=0.5)
    refused("bits", load_policy, "snapkv", ("precision={bits: 3}",))
    refused("keys", load_policy, "snapkv", ("precision={bits: 4, keys: entry}",))
    refused("group", Precision, bits=4, group=0)
    refused("recent", Precision, bits=4, recent=-1)
    refused("channels is the share", Precision, bits=4, channels=0.0)
    refused("channels", Precision, channels=1.5)
    refused("full 1 leaves nothing", Precision, bits=4, full=1.0)
    refused("balance is read where keys are quantised", Precision, channels=0.5, balance=True)
    refused("full_layers shares full entries", Precision, bits=4, full_layers="preference")
    refused("channel_heads shares channels", Precision, bits=4, channel_heads="layer")


def test_policies_refuse_precision_that_they_cannot_follow():
    preference = Precision(bits=4, full=0.3, full_layers="preference")
    refused(
        "measures none", load_policy, "snapkv", ("precision={bits: 4, full: 0.3, full_layers: preference}",)
    )
    assert Policy("arkv", observed="cake", precision=preference).ranks_kept
    refused("full says which entries stay", Policy, "none", precision=Precision(bits=4, full=0.3))
    assert not Policy("none", precision=Precision(bits=4)).ranks_kept
