"""Scores by kernels are what they are without them: in every layer, of everything and of what heads hold.

Kernels run in Triton's interpreter here (on numpy, which warns of the poison in entries that are not held).
Either path is compared with the same score of the same numbers in float64, so that both are held to one bar.
"""

import pytest
import torch

from retain.evidence import Evidence
from retain.kernels import backend
from tests.close import assert_close
from tests.held import filled, held_evidence, single
from tests.naive import assert_heads_close, random_evidence, special_layer
from tests.scores.test_scores import VARIANTS, both, score_of
from tests.test_received_attention import on_device

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# All that a layer may have beside the plain softmax, at once.
SPECIAL = ("window", "sinks", "soft_cap")


def shown(held: bool, special: bool, name: str) -> Evidence:
    """Three sequences, padded; queries that are all there, as `h2o` wants them where nothing was counted."""
    evidence = filled(held_evidence(seed=3, own=False), float("nan"))
    if not held:
        rotary = evidence.rotary
        evidence = random_evidence((0, 4, 1), num_tokens=20, seed=3, dtype=torch.float64, rotary=rotary)
    for layer in SPECIAL if special else ():
        if (name, layer) != ("expected_attention", "soft_cap"):  # refused
            evidence = special_layer(evidence, layer)
    return evidence


# path, what is shown, and in which layer. The interpreter takes its time.
WAYS = [
    *(("reference", held, special) for held in (False, True) for special in (False, True)),
    *(("triton", both, both) for both in (False, True)),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.parametrize(("path", "held", "special"), WAYS)
def test_a_score_is_the_same_by_either_path(path, held, special, name, settings):
    exact = shown(held, special, name)
    evidence = on_device(single(exact))
    want = score_of(exact, name, settings)
    with backend.using(path):
        got = score_of(evidence, name, settings)
    assert (got.unit, got.window) == (want.unit, want.window)
    for own, other in zip(both(got), both(want), strict=True):
        assert torch.equal(own.cpu() > float("-inf"), other > float("-inf"))
        # Attention, a norm, their product, means: an operation each.
        assert_heads_close(own.cpu(), other.double(), ops=4)
    assert (got.layer_weight_B is None) == (want.layer_weight_B is None)
    if want.layer_weight_B is not None:
        for own, other in zip(got.layer_weight_B, want.layer_weight_B, strict=True):
            assert_close(own.cpu(), other, dtype=torch.float32, ops=4)
