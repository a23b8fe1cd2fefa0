"""Every preset and every way to spread a budget: what each promises, and where kept sets do not nest."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.allocation import LAYERS, Allocation
from retain.apportion import exact
from retain.budget import Budget
from retain.policy import (
    candidates_of,
    decide_layers,
    load_policy,
    plan_of,
    policies,
    score_entries,
    shape_of,
)
from retain.presets import REGIMES, Policy
from retain.protection import Protection
from retain.rotary import Rotary
from retain.scores import SCORES, UNITS, Score, masked_score
from retain.scores.trial import try_settings
from retain.stages import FirstStage
from tests.naive import random_evidence

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "policy"
PRESETS = (
    "ada_criticalkv",
    "adakv",
    "cake",
    "criticalkv",
    "defensive",
    "defensivekv",
    "duoattention",
    "expected_attention",
    "full",
    "fused",
    "gate",
    "h2o",
    "keydiff",
    "knorm",
    "lava",
    "layer_defensivekv",
    "lru",
    "pyramidkv",
    "quest",
    "random",
    "recency",
    "snapkv",
    "streaming_llm",
    "tova",
    "vatp",
)
EVICTING = tuple(name for name in PRESETS if name != "full")
# Those whose published method lets layers or heads compete, and how.
SHARED = {
    "ada_criticalkv": ("layer", "uniform"),
    "adakv": ("layer", "uniform"),
    "cake": ("head", "cake"),
    "defensivekv": ("layer", "uniform"),
    "lava": ("layer", "entropy"),
    "layer_defensivekv": ("model", "uniform"),
    "pyramidkv": ("head", "pyramid"),
}
SMALL = ("protection.sinks=2", "protection.minimum=2", "protection.recent=4")
FIXED = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)


def _variants() -> Iterator[Policy]:
    """Every scope, allocation and first stage that may stand together."""
    stages = (None, *(FirstStage(by, 0.5) for by in ("budget", "mass", "mass_released")))
    for scope, layers, spread, safeguard, normalise, stage, by in itertools.product(
        ("head", "layer", "model"),
        LAYERS,
        ("weight", "even"),
        (None, "guaranteed", "convex"),
        (None, "head", "layer"),
        stages,
        ("score", "first"),
    ):
        if spread == "even" and layers != "cake":
            continue
        allocation = Allocation(
            layers, beta=4.0, spread=spread, safeguard=safeguard, normalise=normalise, compete_by=by
        )
        staged = "none" if stage is None else stage.by
        name = f"{scope} {layers} {spread} {safeguard} {normalise} {staged} {by}"
        try:
            yield Policy(
                name,
                observed="critical",
                scope=scope,
                first_stage=stage,
                allocation=allocation,
                floor=None if scope == "head" or normalise == "layer" else "mean",
            )
        except ValueError:
            continue


VARIANTS = {policy.name: policy for policy in _variants()}


@pytest.fixture(scope="module")
def heads_file(tmp_path_factory) -> str:
    """Head classes of three layers of two heads."""
    path = tmp_path_factory.mktemp("heads") / "heads.tsv"
    path.write_text("1.0\t0.0\n0.2\t0.8\n0.6\t0.4\n")
    return str(path)


def _small(name: str, heads_file: str) -> Policy:
    """The preset, with a window that fits short sequences."""
    policy = load_policy(name, SMALL)
    changes = {"window": 4, "page_size": 3, "sinks": 2}
    own = {key: changes.get(key, value) for key, value in policy.observed_settings.items()}
    policy = replace(policy, observed_settings=own)
    if policy.allocation.head_classes is not None:
        policy = replace(policy, allocation=replace(policy.allocation, head_classes=heads_file))
    return policy


def _evidence(seed: int, group: int, num_tokens: int, pads: tuple[int, ...], num_layers: int = 3) -> list:
    """Layers in float64, so that what padding does to a sum is lost where scores become float32."""
    rotary = Rotary(torch.tensor([0.3]))
    return [
        replace(
            random_evidence(
                pads, num_tokens=num_tokens, group=group, seed=seed + idx, dtype=torch.float64, rotary=rotary
            ),
            layer_idx=idx,
        )
        for idx in range(num_layers)
    ]


def _own_part(evidence, b: int):
    """Sequence `b` alone, without its padding."""
    pad = int((~evidence.valid_BT[b]).sum())
    one = evidence.select_batch(slice(b, b + 1))
    return replace(
        one,
        queries_BQSD=one.queries_BQSD[:, :, pad:],
        keys_BHTD=one.keys_BHTD[:, :, pad:],
        values_BHTD=one.values_BHTD[:, :, pad:],
        positions_BT=one.positions_BT[:, pad:],
        valid_BT=one.valid_BT[:, pad:],
    )


def _learned(layers, seed: int) -> list[Score]:
    """A gate's scores."""
    draw = torch.Generator().manual_seed(seed)
    return [
        masked_score(torch.rand(layer.keys_BHTD.shape[:3], generator=draw), layer.valid_BT, "risk")
        for layer in layers
    ]


def _scored(policy: Policy, layers, seeds, learned) -> list[Score]:
    return [
        score_entries(policy, layer, learned=own, seeds_B=seeds)
        for layer, own in zip(layers, learned, strict=True)
    ]


def _made_scores(layers, seed: int, *, ties: bool) -> list[Score]:
    """Scores of every kind that a policy may want of them; with ties, of four values only."""
    scores, draw = [], torch.Generator().manual_seed(seed)
    for idx, layer in enumerate(layers):
        shape = layer.keys_BHTD.shape[:3]
        values, first = (torch.rand(shape, generator=draw) ** 2 for _ in range(2))
        values = values * (1 + idx) * torch.rand(1, shape[1], 1, generator=draw)
        if ties:
            values, first = (values * 4).floor(), (first * 4).floor()
        weight = torch.rand(shape[0], generator=draw, dtype=torch.float64)
        scores.append(
            masked_score(values, layer.valid_BT, "risk", first_BHT=first, window=2, layer_weight_B=weight)
        )
    return scores


def _check(policy: Policy, layers, scores, budget: Budget) -> list[torch.Tensor]:
    """What every eviction owes; returns the keep sets."""
    decisions = decide_layers(policy, layers, budget, scores=scores)
    keeps = [one.keep_BHT for one in decisions]
    plan = plan_of(policy, budget, layers[0].valid_BT, [shape_of(layer) for layer in layers])
    held_B = torch.stack([keep_BHT.sum((1, 2)) for keep_BHT in keeps]).sum(0).tolist()
    lengths = layers[0].valid_BT.sum(-1).tolist()
    heads = sum(layer.num_heads for layer in layers)
    if budget.keep_ratio is not None:
        # Halves are rounded up, layer by layer.
        naive = [
            sum(int(exact(budget.keep_ratio) * n * layer.num_heads + exact(0.5)) for layer in layers)
            for n in lengths
        ]
    else:
        naive = [min(budget.tokens_per_head or 0, n) * heads for n in lengths]
    assert held_B == naive
    for one, score, layer in zip(decisions, scores, layers, strict=True):
        assert not (one.keep_BHT & ~layer.valid_BT[:, None]).any()
        assert not (one.protected_BT[:, None] & ~one.keep_BHT).any()
        assert (one.keep_BHT.sum(-1) > 0).all()
        _check_order(policy, candidates_of(plan, score), one.keep_BHT)
    return keeps


def _check_order(policy: Policy, candidates, keep_BHT: torch.Tensor) -> None:
    """In every head, what the stages before left is kept from the highest score, of equal ones the later."""
    stage = policy.first_stage
    B, H, _ = keep_BHT.shape
    for b in range(B):
        for h in range(H):
            kept = {i for i, own in enumerate(candidates.kept_BHT[b, h].tolist()) if own}
            budget = int(keep_BHT[b, h].sum())
            rows = candidates.score_BHT[b, h].tolist()
            exists = [i for i, value in enumerate(rows) if value > float("-inf")]
            if stage is not None and stage.by == "budget":
                first = candidates.first_BHT[b, h].tolist()
                order = sorted(exists, key=lambda i: (i in kept, first[i], i), reverse=True)
                kept |= set(order[: int(exact(stage.share) * budget)])
            order = sorted(exists, key=lambda i: (i in kept, rows[i], i), reverse=True)
            assert keep_BHT[b, h].nonzero().flatten().tolist() == sorted(order[:budget])


def _check_competition(policy: Policy, layers, scores, budget: Budget, keeps) -> None:
    """Between heads that share, no bid lost to a lower one, of equal ones to an earlier, of those to one of a
    higher layer or head."""
    plan = plan_of(policy, budget, layers[0].valid_BT, [shape_of(layer) for layer in layers])
    pools: dict[tuple[int, int], list[tuple[tuple, bool]]] = {}
    for idx, (score, keep_BHT) in enumerate(zip(scores, keeps, strict=True)):
        bids = candidates_of(plan, score).bids
        assert bids is not None
        for b, h in itertools.product(range(keep_BHT.shape[0]), range(keep_BHT.shape[1])):
            free = int(keep_BHT[b, h].sum()) - int(bids.guaranteed_BH[b, h])
            pool = pools.setdefault((b, 0 if policy.scope == "model" else idx), [])
            mine = bids.select(bids.row_N == b * keep_BHT.shape[1] + h)
            own = sorted(zip(mine.value_N.tolist(), mine.place_N.tolist(), strict=True), reverse=True)
            pool += [((value, place, -idx, -h), rank < free) for rank, (value, place) in enumerate(own)]
    for pool in pools.values():
        won, lost = ([key for key, own in pool if own is side] for side in (True, False))
        assert not won or not lost or min(won) > max(lost)


# What the files say.


def test_every_preset_is_a_file_that_opens_with_what_it_does_needs_and_is_run_by():
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.yaml"))) == PRESETS
    for name in PRESETS:
        lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
        assert all(line.startswith("# ") for line in lines[:3]) and not lines[3].startswith("#")
        assert lines[1].startswith("# Needs: ")
        start = f"# python eval/compare.py --config configs/compare/reference.yaml run={name} 'policies=["
        assert lines[2].startswith(start)
        assert name == "full" or lines[2] == f"{start}{name}]'"
        assert load_policy(name).name == name
    assert tuple(preset.name for preset in policies()) == PRESETS


def test_presets_protect_alike_so_that_a_comparison_compares_scores():
    """But for StreamingLLM, whose protection is the method: sinks and the most recent entries."""
    for name in PRESETS:
        if name != "full":
            streaming = Protection(4, 0.0, 0.0, 4, 32)
            same = Protection(4, 0.1, 0.1, 4, 32)
            assert load_policy(name).protection == (streaming if name == "streaming_llm" else same), name
            text = (FOLDER / f"{name}.yaml").read_text()
            said = "not that of the other presets" if name == "streaming_llm" else "the same in every preset"
            assert f"protection:           # {said}" in text


def test_presets_share_as_published():
    table = {preset.name: (preset.scope, preset.layers) for preset in policies()}
    assert {name: own for name, own in table.items() if own != ("head", "uniform")} == SHARED


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_its_score_really_is(name, heads_file):
    preset = {preset.name: preset for preset in policies()}[name]
    assert preset.regime in REGIMES and preset.paper and preset.cost
    assert (preset.regime == "any") == (name in ("full", "fused", "gate", "random", "recency"))
    layers = _evidence(0, 2, 21, (0, 3))
    policy = _small(name, heads_file)
    score = score_entries(policy, layers[0], learned=_learned(layers, 0)[0], seeds_B=[1, 2])
    assert score.unit == preset.unit
    assert preset.needs >= (SCORES[policy.observed].needs if policy.observed else set())
    assert ("gates" in preset.needs) == policy.learned
    assert ("head_classes" in preset.needs) == (name == "duoattention")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("critical", {"norm": "l1"}),
        ("critical", {"norm": "l2"}),
        ("defensive", {"norm": "raw"}),
        ("defensive", {"norm": "head_share"}),
        ("defensive", {"norm": "token_sum"}),
        ("expected_attention", {"value_norm": "output_l1"}),
        ("expected_attention", {"value_norm": "output_l1", "epsilon": 0.02}),
        ("expected_attention", {"value_norm": "plain"}),
        *((name, {}) for name in SCORES),
    ],
)
def test_a_made_up_layer_shows_a_scores_unit(name, chosen):
    layer = _evidence(0, 2, 41, (0, 3))[0]
    score = SCORES[name].function(layer, **chosen)
    tried, problems = try_settings(name, chosen)
    assert (tried.unit, tried.window, problems) == (score.unit, score.window, [])
    for part in ("first_BHT", "layer_weight_B"):
        assert (getattr(tried, part) is None) == (getattr(score, part) is None)
    assert SCORES[name].unit in UNITS


def test_presets_print_as_a_table():
    lines = str(policies()).splitlines()
    assert len(lines) == len(PRESETS) + 1
    columns = ["name", "unit", "scope", "layers", "regime", "needs", "variants", "cost", "paper"]
    assert lines[0].split() == columns
    starts = [lines[0].index(column) for column in columns]
    lava = lines[1 + PRESETS.index("lava")]
    cells = [lava[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    assert cells[:6] == ["lava", "mass", "layer", "entropy", "query_aware", "window"]
    assert cells[6] == "paper, released" and cells[8].endswith("arXiv 2509.09754")


@pytest.mark.parametrize("name", ["adakv", "ada_criticalkv"])
def test_the_safeguard_of_a_preset_guards(name):
    """Beside what is protected, not inside it: a head that all others outbid keeps a fifth of the mean."""
    policy, layers = load_policy(name), _evidence(3, 1, 400, (0,), num_layers=1)
    loud = torch.tensor([10.0, 0.1]).view(1, 2, 1) * (1 + torch.rand(1, 2, 400))
    scores = [masked_score(loud, layers[0].valid_BT, "mass", first_BHT=loud, window=32)]
    budget = Budget(keep_ratio=0.4)
    free = replace(policy, allocation=replace(policy.allocation, safeguard=None))
    held = [
        decide_layers(own, layers, budget, scores=scores)[0].keep_BHT.sum(-1).tolist()
        for own in (policy, free)
    ]
    # 160 a head in the mean: 16 first and 32 last are protected, and 32 are guaranteed beside them.
    assert held == [[[320 - 80, 80]], [[320 - 48, 48]]]


VARIED = {
    *("snapkv", "adakv", "criticalkv", "ada_criticalkv", "defensivekv", "layer_defensivekv"),
    *("lava", "cake", "h2o", "expected_attention", "vatp"),
}


def test_where_paper_and_released_code_differ_both_are_variants():
    assert {preset.name for preset in policies() if preset.variants} == VARIED
    for name in sorted(VARIED):
        default = load_policy(name)
        paper, released = (load_policy(f"{name}:{variant}") for variant in ("paper", "released"))
        assert (paper.name, released.name) == (f"{name}:paper", f"{name}:released")
        same = [replace(one, name=name, variants={}) for one in (default, paper, released)]
        assert same[1] != same[2], name
        if name != "lava":  # its default is the paper's without a floor, with the released maximum
            assert same[0] in same[1:], name
    with pytest.raises(
        ValueError, match="unknown variant of policy 'lava' 'relased': did you mean 'released'"
    ):
        load_policy("lava:relased")


# What every eviction owes.


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=4)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 4, 8]), st.sampled_from([25, 31]), st.sampled_from([0.5, 0.71])
)
def test_every_preset_keeps_its_budget_and_what_is_protected(heads_file, name, seed, group, tokens, ratio):
    layers, policy = _evidence(seed, group, tokens, (0, 5, 2)), _small(name, heads_file)
    scores = _scored(policy, layers, [3, 4, 5], _learned(layers, seed))
    keeps = _check(policy, layers, scores, Budget(keep_ratio=ratio))
    if policy.scope != "head":
        _check_competition(policy, layers, scores, Budget(keep_ratio=ratio), keeps)
    for full in (Budget(keep_ratio=1.0), Budget(tokens_per_head=tokens)):
        for keep_BHT in _check(policy, layers, scores, full):
            assert torch.equal(keep_BHT, layers[0].valid_BT[:, None].expand_as(keep_BHT))


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=3)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 8]), st.sampled_from([25, 31]))
def test_a_sequence_alone_keeps_what_it_keeps_in_a_padded_batch(heads_file, name, seed, group, tokens):
    layers, policy = _evidence(seed, group, tokens, (0, 5, 2)), _small(name, heads_file)
    learned = _learned(layers, seed)
    together = decide_layers(policy, layers, Budget(keep_ratio=0.5), learned=learned, seeds_B=[3, 4, 5])
    for b, pad in enumerate((0, 5, 2)):
        alone = decide_layers(
            policy,
            [_own_part(layer, b) for layer in layers],
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
    layers = _evidence(seed, 1, 19, (0, 3), num_layers=2)
    scores = _made_scores(layers, seed, ties=ties)
    keeps = _check(policy, layers, scores, Budget(keep_ratio=ratio))
    if policy.scope != "head" and policy.allocation.safeguard != "convex":
        _check_competition(policy, layers, scores, Budget(keep_ratio=ratio), keeps)
    for keep_BHT in _check(policy, layers, scores, Budget(keep_ratio=1.0)):
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
    entry_bytes = shape_of(layers[0]).entry_bytes
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
    layers = _evidence(seed, 1, 15, (0, 2), num_layers=2)
    _check_nesting(policy, layers, _made_scores(layers, seed, ties=ties), tokens, _nests(policy))


def test_a_mass_stage_where_heads_compete_by_attention_does_not_nest():
    """Found by hypothesis: from 4 to 5 tokens a head."""
    policy = replace(VARIANTS["layer uniform weight None head mass first"], protection=FIXED)
    layers = _evidence(334, 1, 15, (0, 2), num_layers=2)
    with pytest.raises(AssertionError):
        _check_nesting(policy, layers, _made_scores(layers, 334, ties=False), 4, "tokens")


@pytest.mark.parametrize("name", EVICTING)
@settings(deadline=None, max_examples=2)
@given(st.integers(0, 10**6), st.integers(8, 14))
def test_kept_sets_of_presets_nest(heads_file, name, seed, tokens):
    """Quest's too: a budget may end inside a page."""
    policy = replace(_small(name, heads_file), protection=FIXED)
    assert (_nests(policy) is None) == (name in ("cake", "lava", "pyramidkv"))
    if _nests(policy):
        layers = _evidence(seed, 4, 21, (0, 3))
        scores = _scored(policy, layers, [3, 4], _learned(layers, seed))
        _check_nesting(policy, layers, scores, tokens, _nests(policy))


NOTHING = Protection(sinks=0, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=0)
FLAT = [[0.0] * 4]
BY_MASS = Policy("mass", observed="critical", protection=NOTHING, first_stage=FirstStage("mass", 0.9))
# The smallest that a search found. Of each: the policy, scores and first-stage scores by layer and head, what
# the layers ask for, a budget in entries, and what each head holds at it and at one entry more.
COUNTEREXAMPLES = {
    # The first stage may take one entry more of both heads, and only one of them has more room.
    "a first stage by mass, at equal heads": (
        BY_MASS,
        [[[3, 0, 2], [4, 3, 3]]],
        [[[2, 3, 2], [4, 1, 4]]],
        [1],
        3,
        [[2, 1]],
        [[2, 2]],
    ),
    "a first stage by mass, where heads compete": (
        replace(BY_MASS, scope="layer"),
        [[[0, 1, 0], [0, 1, 2]]],
        [[[2, 1, 1], [1, 2, 2]]],
        [1],
        3,
        [[2, 1]],
        [[2, 2]],
    ),
    # Two heads are guaranteed an entry more each, and the third pays for one of them.
    "a guaranteed safeguard": (
        Policy(
            "guaranteed",
            observed="critical",
            protection=NOTHING,
            scope="layer",
            allocation=Allocation(safeguard="guaranteed", safeguard_share=0.5),
        ),
        [[[9] * 9, [1] * 9, [1] * 9]],
        None,
        [1],
        11,
        [[9, 1, 1]],
        [[8, 2, 2]],
    ),
    # Largest remainder: 4/3, 10/3, 10/3 are 2, 3, 3, and 3/2, 15/4, 15/4 are 1, 4, 4.
    "CAKE's shares": (
        Policy("cake", observed="cake", protection=NOTHING, allocation=Allocation("cake")),
        [FLAT] * 3,
        None,
        [2, 5, 5],
        8,
        [[2], [3], [3]],
        [[1], [4], [4]],
    ),
    # Rounded down, but one at least, shares are 1, 3, 2, and the first layer is given what is left; then they
    # are 1, 4, 3, and nothing is.
    "CAKE's shares as released": (
        Policy("cake", observed="cake", protection=NOTHING, allocation=Allocation("cake", spread="even")),
        [FLAT] * 3,
        None,
        [1, 5, 4],
        7,
        [[2], [3], [2]],
        [[1], [4], [3]],
    ),
    # Entropies are log 2, log 5, log 5.
    "LAVa's shares": (
        Policy("lava", observed="lava", protection=NOTHING, allocation=Allocation("entropy")),
        [[[1, 1, 0, 0, 0]], [[1] * 5], [[1] * 5]],
        None,
        [1, 1, 1],
        8,
        [[2], [3], [3]],
        [[1], [4], [4]],
    ),
    # The last layer has one entry. Beside it 3.27, 2.33, 1.4 are 3, 2, 2, and 3.73, 2.67, 1.6 are 4, 3, 1.
    "a pyramid": (
        Policy("pyramid", observed="snapkv", protection=NOTHING, allocation=Allocation("pyramid", beta=4.0)),
        [FLAT] * 4,
        None,
        [1, 1, 1, 1],
        8,
        [[3], [2], [2], [1]],
        [[4], [3], [1], [1]],
    ),
}


@pytest.mark.parametrize("kind", COUNTEREXAMPLES)
def test_kept_sets_do_not_nest(kind):
    policy, values, first, weights, total, smaller, larger = COUNTEREXAMPLES[kind]
    layers, scores = [], []
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


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"observed": "snapkv", "observed_settings": {"aggregate": "median"}},
            "'snapkv' does not take .*median",
        ),
        ({"observed": "quest", "observed_settings": {"page_size": 0}}, "page_size is a whole number"),
        ({"observed_settings": {"window": 3}}, "belong to no score: name observed"),
        (
            {"observed": "snapkv", "first_stage": FirstStage()},
            "first_stage want a score of two stages, and 'snapkv' has one: take observed 'critical'",
        ),
        (
            {"observed": "snapkv", "allocation": Allocation("cake")},
            "wants CAKE's preference, and 'snapkv' measures none: take observed 'cake'",
        ),
        (
            {"observed": "knorm", "allocation": Allocation("entropy")},
            "'entropy' want numbers, and 'knorm' is in 'rank'",
        ),
        (
            {"observed": "snapkv", "scope": "model", "allocation": Allocation("pyramid")},
            "lets layers compete, and allocation.layers 'pyramid' gives them shares",
        ),
        (
            {"observed": "snapkv", "allocation": Allocation(safeguard="convex")},
            "allocation.safeguard guards heads that share a budget, and scope 'head' gives each the same",
        ),
        (
            {"observed": "snapkv", "scope": "layer", "allocation": Allocation(head_classes="heads.tsv")},
            "head_classes states each head's budget: take scope 'head'",
        ),
        (
            {
                "observed": "defensive",
                "first_stage": FirstStage("mass", 0.9),
                "allocation": Allocation("pyramid"),
            },
            "a first stage by mass may take a head's whole mean budget",
        ),
    ],
)
def test_what_cannot_be_meant_is_found_when_a_policy_is_made(settings_, message):
    with pytest.raises(ValueError, match=message):
        Policy("mine", **settings_)
