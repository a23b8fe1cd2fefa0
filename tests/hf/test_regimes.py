"""Every regime against the oracle: a full cache that hides, at the same moments, what was evicted."""

import pytest
import torch

import retain
from retain.hf.cache.cache import Cache
from tests.hf.masked import evicting, masked_logits
from tests.hf.naive_regimes import due_after
from tests.hf.regime_runs import (
    Life,
    assert_same_held,
    assert_same_logits,
    differs,
    eviction_free,
    exact_model,
    life,
    lived,
)
from tests.tiny import FAMILIES

WHEN = ("prefill", "chunk", "decode", "prefill+decode", "chunk+decode")
MATRIX = [
    *((family, when, 3) for family in FAMILIES for when in WHEN),
    *((family, "chunk+decode", 1) for family in FAMILIES),
]
EVERY = 3


class Recorder:
    """A policy that draws what it keeps of the columns that it is shown, and notes it down by position."""

    def __init__(self, model, seed: int = 0):
        self.draw = torch.Generator().manual_seed(seed)
        self.number = {idx: number for number, idx in enumerate(evicting(model))}
        # Of the forward that runs now: layer -> what each (sequence, head) keeps, as positions.
        self.moments: dict[int, dict[int, list[list[set[int]]]]] = {}
        self.forward = -1

    def watch(self, forward: int) -> None:
        self.forward = forward

    def __call__(self, evidence):
        B, H, T = evidence.keys_BHTD.shape[:3]
        ratio = 0.5 + 0.4 * torch.rand(B, H, 1, generator=self.draw)
        keep = (torch.rand(B, H, T, generator=self.draw) < ratio) & evidence.exists_BHT
        scenario = [[set(evidence.positions_BT[b][keep[b, h]].tolist()) for h in range(H)] for b in range(B)]
        layers = self.moments.setdefault(self.forward, {})
        assert evidence.layer_idx not in layers  # once a moment
        layers[evidence.layer_idx] = scenario
        return keep


def oracle(model, recorder: Recorder, scenario: Life):
    """Logits of a full cache that hides what was evicted, once it was; and what is left after each."""
    history, seen = [], 0

    def after(forward: int, kept: list[torch.Tensor]) -> None:
        nonlocal seen
        seen += scenario.chunks[forward].shape[1]
        valid = scenario.mask[:, :seen].bool()
        for idx, number in recorder.number.items():
            old = kept[number]
            fresh = valid[:, None, old.shape[-1] :].expand(-1, old.shape[1], -1)
            held = torch.cat([old, fresh], -1)
            for b, heads in enumerate(recorder.moments.get(forward, {}).get(idx, [])):
                tokens = valid[b].nonzero().flatten()
                for h, positions in enumerate(heads):
                    left = torch.zeros(seen, dtype=torch.bool)
                    left[tokens[sorted(positions)]] = True
                    assert not (left & ~held[b, h]).any()  # nothing comes back
                    held[b, h] = left
            kept[number] = held
        history.append([held.clone() for held in kept])

    return masked_logits(model, None, scenario.chunks, scenario.mask, after=after), history


@pytest.mark.parametrize(("family", "when", "batch"), MATRIX)
def test_any_policy_in_any_regime_equals_a_full_cache_masked_at_the_same_moments(family, when, batch):
    model = exact_model(family)
    scenario = life(batch)
    recorder = Recorder(model)
    with retain.attach(model):
        cache = Cache(model, policy=recorder, when=when, every=EVERY)
        got, held = lived(model, cache, scenario, recorder.watch)
    want, kept = oracle(model, recorder, scenario)
    assert_same_logits(got, want, scenario.mask)
    # A layer with a window is not asked about what no later query sees: that goes first.
    assert_same_held(held, kept)
    sizes = [ids.shape[1] for ids in scenario.chunks]
    moments = [number for number, due in enumerate(due_after(when, EVERY, sizes, scenario.prompt)) if due]
    assert sorted(recorder.moments) == moments and cache.evictions == len(moments)
    assert all(len(layers) == len(recorder.number) for layers in recorder.moments.values())
    assert differs(got, eviction_free(model, scenario), scenario.mask)
