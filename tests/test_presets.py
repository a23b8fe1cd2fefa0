"""Presets: what their files say, and what cannot be meant."""

import copy
import pickle
from dataclasses import replace
from typing import get_args

import pytest
import torch

from retain import presets
from retain.budget.statement import Budget
from retain.policy import decide_layers, load_policy, policies, score_entries
from retain.presets import Draw, Evaluated, Pyramid
from retain.protection import Protection
from retain.scores import SCORES, masked_score
from tests.evictions import FOLDER, PRESETS, SHARED, learned_scores, make_evidence, policy_of, small
from tests.refused import refused


def test_the_old_name_of_a_preset_is_read_with_a_warning():
    with pytest.warns(FutureWarning, match="preset 'fused' is called 'learned'; the next release"):
        assert load_policy("fused", ["draw=null"]) == load_policy("learned", ["draw=null"])


def test_presets_protect_alike_so_that_a_comparison_compares_scores():
    """But for StreamingLLM, whose protection is the method, and for `learned` and `merge`, whose protection
    was chosen with them: comparisons measure their rivals under it too (`configs/compare/smollm2.yaml`)."""
    each = {
        "streaming_llm": (Protection(4, 0.0, 0.0, 4, 32), "not that of the other presets"),
        **dict.fromkeys(
            ("learned", "merge"), (Protection(4, 0.0, 0.0, 0, 8), "the least that structure needs")
        ),
    }
    for name in PRESETS:
        if name not in ("full", "kivi"):  # which keep everything
            same = Protection(4, 0.1, 0.1, 4, 32), "the same in every preset but learned and merge"
            protection, said = each.get(name, same)
            assert load_policy(name).protection == protection, name
            text = (FOLDER / f"{name}.yaml").read_text()
            assert f"protection:           # {said}" in text


def test_presets_share_as_published_and_print_as_a_table():
    lines = str(policies()).splitlines()
    assert lines[0].split() == ["name", "unit", "scope", "layers", "evaluated", "needs"]
    lava = lines[1 + PRESETS.index("lava")]
    assert lava.split() == ["lava", "mass", "layer", "entropy", "question", "known", "window"]
    table = {preset.name: (preset.scope, preset.layers) for preset in policies()}
    assert {name: each for name, each in table.items() if each != ("head", "uniform")} == SHARED


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_its_score_really_is(name, heads_file):
    preset = {preset.name: preset for preset in policies()}[name]
    assert preset.evaluated in get_args(Evaluated) and preset.paper
    assert (preset.evaluated == "any") == (
        name in ("full", "learned", "gate", "kivi", "merge", "random", "recency")
    )
    layers = make_evidence(0, 2, 21, (0, 3))
    policy = small(name, heads_file)
    score = score_entries(policy, layers[0], learned=learned_scores(layers, 0)[0], seeds_B=[1, 2])
    assert score.unit == preset.unit
    assert preset.needs >= set(SCORES[policy.observed].needs if policy.observed else ())
    assert ("gates" in preset.needs) == policy.learned
    assert ("weights" in preset.needs) == (name in ("duoattention", "headkv"))


@pytest.mark.parametrize("name", ["adakv", "ada_criticalkv"])
def test_the_safeguard_of_a_preset_guards(name):
    """Beside what is protected, not inside it: a head that all others outbid keeps a fifth of the mean."""
    policy, layers = load_policy(name), make_evidence(3, 1, 400, (0,), num_layers=1)
    loud = torch.tensor([10.0, 0.1]).view(1, 2, 1) * (1 + torch.rand(1, 2, 400))
    scores = [masked_score(loud, layers[0].valid_BT, "mass", first_BHT=loud, window=32)]
    budget = Budget(keep_ratio=0.4)
    free = replace(policy, allocation=replace(policy.allocation, safeguard=None))
    held = [
        decide_layers(each, layers, budget, scores=scores)[0].keep_BHT.sum(-1).tolist()
        for each in (policy, free)
    ]
    # 160 a head in the mean: 16 first and 32 last are protected, and 32 are guaranteed beside them.
    assert held == [[[320 - 80, 80]], [[320 - 48, 48]]]


REFUSED = [
    ({"settings": {"window": 3}}, "belong to no score: name observed"),
    *(
        ({"observed": "snapkv", **settings}, message)
        for settings, message in (
            ({"settings": {"pool": "median"}}, "snapkv.pool: .*median"),
            (
                {"first_stage": {}},
                "want a score of two stages, and 'snapkv' has one: take observed 'critical'",
            ),
            (
                {"allocation": {"layers": "cake"}},
                "wants CAKE's preference, and 'snapkv' measures none: take observed 'cake'",
            ),
            (
                {"scope": "model", "allocation": {"layers": "pyramid"}},
                "allocation.layers: input should be 'uniform', got 'pyramid'",
            ),
            (
                {"allocation": {"safeguard": "guaranteed"}},
                "unknown key 'allocation.safeguard'",
            ),
            (
                {"scope": "layer", "allocation": {"weights": "heads.json"}},
                "allocation.layers: input should be one of 'uniform', .*, got 'by_head'",
            ),
            (
                {"allocation": {"layers": "pyramid", "weights": "heads.json"}},
                "unknown key 'allocation.weights'",
            ),
        )
    ),
    ({"observed": "quest", "settings": {"page_size": 0}}, "quest.page_size: input should be greater"),
    (
        {"observed": "knorm", "allocation": {"layers": "entropy"}},
        "'entropy' wants numbers, and 'knorm' is in 'rank'",
    ),
    (
        {
            "observed": "defensive",
            "first_stage": {"by": "mass", "share": 0.9},
            "allocation": {"layers": "pyramid"},
        },
        "a first stage by mass may take a head's whole mean budget",
    ),
]


@pytest.mark.parametrize(("settings_", "message"), REFUSED)
def test_what_cannot_be_meant_is_found_when_a_policy_is_made(settings_, message):
    refused(message, policy_of, "mine", **settings_)


def test_a_policy_made_in_code_is_one_of_three_kinds():
    """Each kind refuses what contradicts its scope, which the class that they share could not."""
    for stated in (
        {},
        {"scope": "head", "draw": Draw(0.5)},
        {"scope": "model", "allocation": Pyramid("pyramid")},
    ):
        with pytest.raises(TypeError, match="HeadPolicy, LayerPolicy or ModelPolicy"):
            presets.Policy("mine", observed="snapkv", **stated)
    made = presets.ModelPolicy("mine", observed="snapkv", draw=Draw(0.5))
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == replace(made, draw=made.draw)
    refused("draw", presets.HeadPolicy, "mine", observed="snapkv", draw=Draw(0.5))
    refused("allocation", presets.ModelPolicy, "mine", observed="snapkv", allocation=Pyramid("pyramid"))
