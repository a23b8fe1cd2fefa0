"""Keep sets of one prompt, from what the engine holds of it, are those that all its tensors give."""

from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.capability import problems
from retain.gates import build_gates
from retain.policy import candidates_of, load_policy, score_entries
from retain.shapes import LayerShape
from retain.vllm.packing.eviction import Arrival, decide
from retain.vllm.packing.whole_pages import keep_pages
from retain.vllm.settings import SHORT_TOKENS, Rules
from tests.evictions import PRESETS
from tests.naive import random_evidence
from tests.refused import refused

PAGE = 16
SERVED = tuple(
    name
    for name in PRESETS
    if name != "full"
    and load_policy(name).weights is None
    and not load_policy(name).learned
    and not problems(load_policy(name), ("vllm",))
)
SERVED += ("gate", "learned")


def made(name: str, length: int, *overrides: str, num_layers: int = 3):
    """A policy's rules, the layers of a prompt as `retain.Cache` sees them, and gates."""
    policy = load_policy(name, overrides)
    evidence = [
        replace(
            random_evidence((0,), num_tokens=length, seed=7 * idx, hidden_BTE=torch.randn(1, length, 5)),
            layer_idx=idx,
        )
        for idx in range(num_layers)
    ]
    gates = build_gates("linear", {idx: {"E": 5, "H": 2} for idx in range(num_layers)})
    return Rules(policy, PAGE, [LayerShape(2, 24)] * num_layers), evidence, gates if policy.learned else None


def decided(rules, evidence, gates, budget, seed=3):
    """Decide as a worker does: of the last queries alone, and the gates' scores. `[B, H, T]` a layer."""
    T, window = evidence[0].num_seen, rules.window

    def shown(one):
        queries = one.queries_BQSD[:, :, T - window :]
        learned_BHT = gates.learned(one) if gates else None
        return replace(one, queries_BQSD=queries, learned_BHT=learned_BHT, hidden_BTE=None)

    asked = Arrival("a", T, rules.kept(T, budget), budget, seed)
    return [keep_HT[None] for keep_HT in decide(rules, map(shown, evidence), asked, gates)]


def expected(rules, evidence, gates, budget, seed=3):
    """Masks `[B, H, T]` of each layer, decided from all tensors of a prompt."""
    plan, policy = rules.plan(evidence[0].num_seen, budget), rules.policy
    learned = [gates.score(one) if gates else None for one in evidence]
    pairs = zip(evidence, learned, strict=True)
    scores = [score_entries(policy, one, learned=score, seeds_B=[seed]) for one, score in pairs]
    return keep_pages(plan, [candidates_of(plan, score) for score in scores], rules.page)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("length", [300, 320, 401])
def test_the_same_entries_stay(name, length):
    rules, evidence, gates = made(name, length)
    budget = Budget(keep_ratio=0.4)
    masks, wanted = decided(rules, evidence, gates, budget), expected(rules, evidence, gates, budget)
    assert all(torch.equal(mask, one) for mask, one in zip(masks, wanted, strict=True))
    kept, tail = rules.kept(length, budget), length % PAGE
    assert kept < length // PAGE
    assert sum(int(mask.sum()) for mask in masks) == 6 * (kept * PAGE + tail)


def test_another_seed_draws_other_entries():
    rules, evidence, gates = made("random", 400)
    budget = Budget(tokens_per_head=100)
    one, again, other = (decided(rules, evidence, gates, budget, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_short_prompt_is_held_whole_and_a_long_one_refused():
    budget = Budget(tokens_per_head=PAGE)
    rules, evidence, gates = made("snapkv", SHORT_TOKENS)
    assert rules.kept(SHORT_TOKENS, budget) == SHORT_TOKENS // PAGE
    assert all(mask.all() for mask in decided(rules, evidence, gates, budget))
    refused("protect", rules.kept, SHORT_TOKENS + 1, budget)


def test_a_prompt_that_is_shorter_than_the_window_is_held_whole():
    policy = load_policy("snapkv", ["observed_settings.window=48", "protection.recent=2"])
    rules, budget = Rules(policy, 4, [LayerShape(2, 24)] * 2), Budget(keep_ratio=0.5)
    assert rules.kept(47, budget) == 11 and rules.kept(48, budget) < 12


def test_a_policy_that_keeps_everything_frees_nothing():
    assert Rules(load_policy("full"), 4, [LayerShape(2, 24)] * 2).kept(400, Budget(keep_ratio=0.5)) == 100
