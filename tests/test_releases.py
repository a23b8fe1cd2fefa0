"""`NAME:released` keeps what the release keeps: each release's rule stated again, in a few plain lines.

A rule here takes our scores of the entries (tests/scores holds each against its formula) and what the release
calls its compression ratio, and answers with keep masks. All of it is the release's own: what it forces and
how, what it rounds, how its layers and heads share. Where a release leaves a tie to its `topk`, the later
entry wins here, as everywhere in the project.
"""

import math
from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget, LayerShape, spread
from retain.head_tables import format_table
from retain.policy import decide_layers, load_policy, policies
from retain.scores import SCORES, masked_score
from tests.evictions import FOLDER, make_evidence, own_part

W, LAYERS, HEADS = 32, 3, 2
MOST = torch.finfo(torch.float32).max


def order(score_N, place_N):
    return sorted(range(len(score_N)), key=lambda i: (-float(score_N[i]), -int(place_N[i]), i))


def top(score_HT, count):
    keep = torch.zeros(score_HT.shape, dtype=torch.bool)
    for head, score_T in enumerate(score_HT):
        keep[head, order(score_T, range(len(score_T)))[:count]] = True
    return keep


def top_of_all(score_HT, count):
    H, T = score_HT.shape
    keep = torch.zeros(H * T, dtype=torch.bool)
    keep[order(score_HT.flatten(), list(range(T)) * H)[:count]] = True
    return keep.view(H, T)


def values(name, evidence, **settings):
    """Our score of one sequence, `[H, T]`, and its first stage's."""
    found = SCORES[name].function(evidence, **settings)
    first = None if found.first_BHT is None else found.first_BHT[0].double()
    return found.values_BHT[0].double(), first


def padded(score_HT):
    """The window in the place where presses put it: one above the best of what stands before it."""
    score_HT = score_HT.clone()
    score_HT[:, -W:] = score_HT[:, :-W].max() + 1
    return score_HT


def per_head(tokens, r):
    return max(1, int(tokens * (1 - r)))


def window_press(evidence, r, layer, tokens):
    return top(padded(values("snapkv", evidence)[0]), per_head(tokens, r))


def tova(evidence, r, layer, tokens):
    score = values("tova", evidence)[0]
    score[:, -1] = score[:, :-1].max() + 1
    return top(score, per_head(tokens, r))


def plain(name, **settings):
    return lambda evidence, r, layer, tokens: top(values(name, evidence, **settings)[0], per_head(tokens, r))


def expected_attention(evidence, r, layer, tokens):
    score = values("expected_attention", evidence)[0]
    score[:, :4] = score[:, 4:].max() + 1
    return top(score, per_head(tokens, r))


def streaming(evidence, r, layer, tokens):
    keep = torch.ones(HEADS, tokens, dtype=torch.bool)
    gone = tokens - per_head(tokens, r)
    keep[:, 4 : 4 + gone] = False
    keep[:, : max(0, 4 - per_head(tokens, r))] = False  # its topk leaves open which of the sinks
    return keep


def pyramid(evidence, r, layer, tokens):
    capacity = W + tokens * (1 - r)
    low = (capacity - W) / 20
    high = (capacity - W) * 2 - low
    if high >= tokens - W:
        high = tokens - W
        low = (capacity - W) * 2 - high
    if tokens >= high >= low >= W:
        count = round(high - layer * (high - low) / (LAYERS - 1))
    else:
        count = max(1, round(tokens * (1 - r)))
    return top(padded(values("snapkv", evidence)[0]), count)


def two_stages(first_HT, norm_HT, counts, share=0.5, safe=0):
    """CriticalKV: the first of each head by attention, then by attention times norm."""
    keep = torch.zeros(first_HT.shape, dtype=torch.bool)
    for head, count in enumerate(counts):
        by_first = order(first_HT[head], range(first_HT.shape[1]))
        second = (first_HT[head] + 1e-4) * norm_HT[head]
        second[by_first[: max(safe, int(count * share))]] = MOST
        keep[head, order(second, range(len(second)))[:count]] = True
    return keep


def critical_parts(evidence):
    score, first = values("critical", evidence)
    return padded(first), score / (first + 1e-4)


def critical(evidence, r, layer, tokens):
    first, norm = critical_parts(evidence)
    return two_stages(first, norm, [per_head(tokens, r)] * HEADS)


def safeguarded(score_HT, tokens, r):
    """AdaKV: the window counts among the fifth that each head keeps in any case."""
    safe = max(1, int(per_head(tokens, r) * 0.2))
    return score_HT.masked_fill(top(score_HT, safe), MOST), safe


def ada(evidence, r, layer, tokens):
    score, _ = safeguarded(padded(values("snapkv", evidence)[0]), tokens, r)
    return top_of_all(score, HEADS * per_head(tokens, r))


def ada_critical(evidence, r, layer, tokens):
    first, norm = critical_parts(evidence)
    guarded, safe = safeguarded(first, tokens, r)
    counts = top_of_all(guarded, HEADS * per_head(tokens, r)).sum(-1).tolist()
    return two_stages(first, norm, counts, safe=safe)


def defensive_scores(evidence, r, tokens):
    """Its first stage and its window, level with the best score of the layer."""
    score, first = values("defensive", evidence, norm="head_share")
    before, attention = score[:, :-W].clone(), first[:, :-W]
    bias = float(attention[:, -W:].sum(-1).mean())
    limit = int((tokens - W) * (1 - r) - W)
    best = before.max()
    for head in range(HEADS):
        by_mass = order(attention[head], range(tokens - W))
        mass = (attention[head] / attention[head].sum())[by_mass].cumsum(0)
        count = int((mass >= 0.9 - bias).int().argmax())
        before[head, by_mass[: min(count, limit)]] = best
    return torch.cat([before, torch.full((HEADS, W), float(best), dtype=before.dtype)], dim=1)


def defensive(evidence, r, layer, tokens):
    return top_of_all(defensive_scores(evidence, r, tokens), int(tokens * (1 - r) * HEADS))


RULES = {
    "snapkv": window_press,
    "tova": tova,
    "knorm": plain("knorm"),
    "keydiff": plain("keydiff"),
    "lagkv": plain("lagkv", lag=128),
    "h2o": plain("h2o", reduce="mean"),
    "expected_attention": expected_attention,
    "streaming_llm": streaming,
    "pyramidkv": pyramid,
    "criticalkv": critical,
    "adakv": ada,
    "ada_criticalkv": ada_critical,
    "defensivekv": defensive,
}


def layer_defensive(layers, r, tokens):
    """One top-k over the heads of all layers, each layer's forced entries at its own best score."""
    scores = torch.cat([defensive_scores(one, r, tokens) for one in layers])
    kept = top_of_all(scores, int(tokens * (1 - r) * HEADS * LAYERS))
    return list(kept.split(HEADS))


def cake(layers, r, tokens):
    """Shares in whole entries a head; what a layer cannot hold goes round once, and so what is left."""
    found = [SCORES["cake"].function(one) for one in layers]
    asked = [float(one.layer_weight_B[0]) for one in found]
    most, total = tokens - W, int((tokens * (1 - r) - W) * LAYERS)
    shares = [int(own / sum(asked) * total) for own in asked]
    surplus = sum(max(0, own - most) for own in shares)
    shares = [min(own, most) for own in shares]
    for left in (surplus, None):
        left = total - sum(shares) if left is None else left
        below = [i for i in range(LAYERS) if shares[i] < most]
        for turn, i in enumerate(below):
            shares[i] += left // len(below) + (turn < left % len(below))
    keeps = []
    for one, share in zip(found, shares, strict=True):
        keep = top(one.values_BHT[0, :, :-W], min(share, most))
        keeps.append(torch.cat([keep, torch.ones(HEADS, W, dtype=torch.bool)], dim=1))
    return keeps


def headkv(layers, r, tokens):
    """Numbers of a table in parts of the pool; each head's budget is rounded alone, its window beside it."""
    mean = per_head(tokens, r) - 8
    pool = mean // 1.5
    keeps = []
    for one, row in zip(layers, HEAD_TABLE, strict=True):
        score = values("snapkv", one, window=8, pool="max", pool_size=7)[0]
        whole = sum(map(sum, HEAD_TABLE))
        counts = [round(own / whole * pool * LAYERS * HEADS + mean - pool) for own in row]
        counts = counts if mean <= tokens - 8 else [tokens - 8] * HEADS
        rows = [top(score[h : h + 1, :-8], count) for h, count in enumerate(counts)]
        keeps.append(torch.cat([torch.cat(rows), torch.ones(HEADS, 8, dtype=torch.bool)], dim=1))
    return keeps


def compresskv(layers, r, tokens):
    """Layers in whole entries a head: 32 and a part of the rest, cut at three means, then one by one."""
    mean = per_head(tokens, r)
    total, most = mean * LAYERS, 3 * mean
    part = [error / sum(LAYER_ERRORS) for error in LAYER_ERRORS]
    budgets = [min(max(32 + round(own * (total - 32 * LAYERS)), 32), most) for own in part]
    while diff := total - sum(budgets):
        step = 1 if diff > 0 else -1
        able = [i for i in range(LAYERS) if (budgets[i] < most if step > 0 else budgets[i] > 32)]
        if not able:
            break
        for i in sorted(able, key=lambda i: -step * part[i])[: abs(diff)]:
            budgets[i] += step
    keeps = []
    for one, budget in zip(layers, budgets, strict=True):
        keep = top(values("compresskv", one)[0][:, :-8], max(0, budget - 8))
        keeps.append(torch.cat([keep, torch.ones(HEADS, 8, dtype=torch.bool)], dim=1))
    return keeps


HEAD_TABLE, LAYER_ERRORS = ((1.0, 0.25), (0.1, 0.0), (0.5, 0.4)), (0.2, 1.0, 0.55)
JOINT = {"layer_defensivekv": layer_defensive, "cake": cake, "headkv": headkv, "compresskv": compresskv}
# CAKE's own window and DefensiveKV's want more than 32 of the prompt.
RATIOS = ((40, 0.2), (41, 0.1), (60, 0.5), (100, 0.2), (180, 0.5), (184, 0.7))
CASES = [*((tokens, ratio, (0,)) for tokens, ratio in RATIOS), (150, 0.6, (0, 21))]


def wanted(name, layers, ratio):
    tokens, r = layers[0].num_seen, 1 - ratio
    if name in JOINT:
        return JOINT[name](layers, r, tokens)
    return [RULES[name](one, r, idx, tokens) for idx, one in enumerate(layers)]


@pytest.mark.parametrize("name", [*RULES, *JOINT])
def test_a_release_is_kept_to_the_letter(name, tmp_path):
    """Releases read one prompt at a time; ours pads them, which is the last case."""
    for file, rows in (("heads", HEAD_TABLE), ("layers", [(own,) for own in LAYER_ERRORS])):
        (tmp_path / file).write_text(format_table(rows, range(LAYERS)))
    policy = load_policy(f"{name}:released")
    if name == "compresskv":  # all heads vote
        policy = replace(policy, observed_settings={**policy.observed_settings, "retrieval_heads": None})
    tables = {"head_importance": str(tmp_path / "heads"), "layer_errors": str(tmp_path / "layers")}
    policy = policy.with_tables(tables)
    longer = ((400, 0.5, (0,)), (300, 0.7, (0, 21))) if name == "lagkv" else ()  # than two of its blocks
    for tokens, ratio, pads in (*CASES, *longer):
        if name in ("cake", "defensivekv", "layer_defensivekv") and tokens * ratio < 2 * W:
            continue  # theirs leaves to ties, or to an error, what happens to a window that does not fit
        if name in ("headkv", "compresskv") and per_head(tokens, 1 - ratio) < 8:
            continue
        layers = make_evidence(tokens, 2, tokens, pads, num_layers=LAYERS)
        got = decide_layers(policy, layers, Budget(keep_ratio=ratio))
        for b, pad in enumerate(pads):
            alone = [own_part(one, b) for one in layers]
            for own, keep_HT in zip(got, wanted(name, alone, ratio), strict=True):
                assert torch.equal(own.keep_BHT[b, :, pad:], keep_HT), (tokens, ratio, b)


def test_a_head_that_others_outbid_keeps_its_safeguard_through_both_stages():
    """CriticalKV on AdaKV: the fifth is safe from the second stage, too, which would take others."""
    tokens, ratio = 120, 0.5
    (layer,) = make_evidence(2, 1, tokens, (0,), num_layers=1)
    draw = torch.Generator().manual_seed(0)
    first = padded(torch.rand(HEADS, tokens, generator=draw) * torch.tensor([[1.0], [0.01]]))
    first[1, :-W] = first[1, :-W].sort(descending=True).values  # what the first stage leaves has the norm
    norm = torch.linspace(0.1, 10.0, tokens, dtype=torch.float64).expand(HEADS, tokens)
    score = masked_score(
        ((first + 1e-4) * norm)[None], layer.valid_BT, "risk", first_BHT=first[None], window=W
    )
    policy = load_policy("ada_criticalkv:released", ["allocation.safeguard_share=0.7"])
    (got,) = decide_layers(policy, [layer], Budget(keep_ratio=ratio), scores=[score])
    safe = int(per_head(tokens, 0.5) * 0.7)
    counts = top_of_all(first.double().masked_fill(top(first, safe), MOST), HEADS * 60).sum(-1).tolist()
    assert counts[1] == safe > W
    assert torch.equal(got.keep_BHT[0], two_stages(first.double(), norm, counts, safe=safe))
    assert not torch.equal(got.keep_BHT[0], two_stages(first.double(), norm, counts))


def test_adakvs_safeguard_counts_the_window():
    """A head that others outbid holds its window, and a safeguard that is longer no more than that."""
    (layer,) = make_evidence(2, 1, 200, (0,), num_layers=1)
    draw = torch.Generator().manual_seed(0)
    score = padded(torch.rand(HEADS, 200, generator=draw) * torch.tensor([[1.0], [0.01]]))
    made = [masked_score(score[None], layer.valid_BT, "mass", window=W)]
    for ratio, quiet in ((0.2, W), (0.9, None)):
        (got,) = decide_layers(load_policy("adakv:released"), [layer], Budget(keep_ratio=ratio), scores=made)
        guarded, safe = safeguarded(score, 200, 1 - ratio)
        assert torch.equal(got.keep_BHT[0], top_of_all(guarded, HEADS * per_head(200, 1 - ratio)))
        assert quiet is None or (safe < W and got.keep_BHT[0].sum(-1)[1] == quiet)
    (got,) = decide_layers(
        load_policy("adakv:released", ["allocation.safeguard_share=0.9"]),
        [layer],
        Budget(keep_ratio=0.5),
        scores=made,
    )
    assert got.keep_BHT[0].sum(-1).tolist() == [110, 90]


def test_every_release_has_a_rule_here_and_a_source():
    """And a twin: its score under the common protection and exact budget."""
    released = {preset.name for preset in policies() if "released" in preset.variants}
    assert released == {*RULES, *JOINT}
    for name in released:
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        line = next(line for line in text.splitlines() if line.startswith("  released:"))
        assert "kvpress 0.5.5" in line or "github.com/" in line, name
        code, whole, default = (load_policy(f"{name}{own}") for own in (":code", ":released", ""))
        assert code.protection == default.protection and code.allocation.rounding == "exact"
        assert whole.allocation.rounding != "exact" and whole.protection.sinks == 0


def test_a_ratio_is_rounded_as_releases_round_it():
    """20 % of 100 entries are 19 in double precision where 80 % go; ours are 20."""
    two = [LayerShape(2, 1)] * 3
    entries = {
        own: spread(Budget(keep_ratio=0.2), [100], two, rounding=own).total_B[0]
        for own in ("exact", "head", "layer", "model")
    }
    assert entries == {"exact": 120, "head": 3 * 2 * 19, "layer": 3 * 39, "model": 119}
    assert spread(Budget(keep_ratio=0.01), [40], two, rounding="head").equal_BL == ((2, 2, 2),)
    assert spread(Budget(tokens_per_head=7), [40], two, rounding="head").total_B == [42]
    assert math.isclose(spread(Budget(keep_ratio=0.2), [100], two, rounding="head").share_of(0), 0.2)
