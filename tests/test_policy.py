"""The pipeline as a whole: presets, budgets realised exactly, controls, and what nesting does and does not "
"promise."""

from dataclasses import replace

import pytest
import torch

from retain.budget.statement import Budget
from retain.policy import Decision, decide_layers, load_policy
from retain.presets import Policy
from retain.protection import Protection
from retain.scores import Score, masked_score
from tests.evictions import policy_of
from tests.naive import random_evidence

SMALL = ("protection.recent=8",)


def _small(name: str) -> Policy:
    """The preset, with a window that fits short sequences."""
    policy = load_policy(name, SMALL)
    if "window" in policy.observed_settings:
        policy = replace(policy, observed_settings={**policy.observed_settings, "window": 8})
    return policy


def _learned(evidence, seed: int = 5) -> Score:
    draw = torch.Generator().manual_seed(seed)
    return masked_score(torch.rand(evidence.keys_BHTD.shape[:3], generator=draw), evidence.valid_BT, "risk")


def decide(policy, evidence, budget, *, learned=None, observed=None, score=None, seeds_B=None) -> Decision:
    """`decide_layers` of one layer."""
    named = {"learned": learned, "observed": observed, "scores": score}
    listed = {name: None if one is None else [one] for name, one in named.items()}
    (decision,) = decide_layers(policy, [evidence], budget, seeds_B=seeds_B, **listed)
    return decision


def test_a_control_runs_through_the_same_stages():
    """An observed score that is handed in replaces the policy's own; protection and budget stay."""
    evidence = random_evidence(pads=(0, 17), num_tokens=100)
    control = _learned(evidence, seed=9)
    for name in ("snapkv", "full"):
        policy = replace(_small(name), protection=load_policy("snapkv", SMALL).protection)
        decision = decide(policy, evidence, Budget(keep_ratio=0.3), observed=control)
        assert decision.score_BHT is control.values_BHT
        assert decision.keep_BHT.sum((1, 2)).tolist() == [60, 50]
        assert not (decision.protected_BT[:, None] & ~decision.keep_BHT).any()


def test_a_first_stage_by_mass_guarantees_every_head_what_the_fullest_needs():
    """Heads of a layer have equal budgets: three entries of head 0 hold the mass, so head 1 gets three too,
    though by the entropy of its scores the layer would get nothing."""
    policy = policy_of(
        "own",
        observed="critical",
        protection=Protection(0, 0.0, 0.0, 0, 0),
        allocation={"layers": "entropy"},
        first_stage={"by": "mass", "share": 0.8},
    )
    layers = [replace(random_evidence((0,), num_tokens=8, seed=idx), layer_idx=idx) for idx in range(2)]
    spread, sharp = torch.tensor([0.25] * 4 + [0.0] * 4), torch.tensor([1.0] + [0.0] * 7)
    made = ((sharp, (spread, sharp)), (torch.ones(8), (sharp, sharp)))  # values; first of each head
    scores = [
        masked_score(values.expand(1, 2, 8), layer.valid_BT, "risk", first_BHT=torch.stack(first)[None])
        for layer, (values, first) in zip(layers, made, strict=True)
    ]
    decisions = decide_layers(policy, layers, Budget(tokens_per_head=4), scores=scores)
    assert [one.keep_BHT.sum(-1).tolist() for one in decisions] == [[[3, 3]], [[5, 5]]]
    assert decisions[0].keep_BHT[0, 0].nonzero().flatten().tolist() == [1, 2, 3], "of equals the later ones"


def test_a_learned_policy_needs_a_gates_score():
    evidence = random_evidence(num_tokens=60)
    with pytest.raises(ValueError, match="policy 'gate' takes a gate's score and there is none: pass gates="):
        decide(_small("gate"), evidence, Budget(keep_ratio=0.5))
