import pytest
import torch

from retain.scores import random
from tests.naive import naive_scores, random_evidence

MASK = 2**64 - 1


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@pytest.mark.parametrize("seeds", [[0, 1], [-5, 2**63 + 17]])
def test_random_is_its_formula(seeds):
    evidence = random_evidence(pads=(0, 4))

    def number(b, h, i):
        state = _mix((_mix((_mix(seeds[b] & MASK) + 3) & MASK) + h) & MASK)
        return (_mix((state + i - (0, 4)[b]) & MASK) >> 40) / 2**24

    score = random(evidence, seeds_B=seeds).values_BHT
    assert score.tolist() == naive_scores(evidence, number).tolist()


def test_the_same_seed_gives_the_same_scores_in_any_batch_and_padding():
    one = random(random_evidence(pads=(4,)), seeds_B=[9]).values_BHT[0, :, 4:]
    other = random(random_evidence(pads=(0, 4, 6), num_tokens=16), seeds_B=torch.tensor([1, 2, 9])).values_BHT
    assert torch.equal(one, other[2, :, 6:])


def test_seeds_layers_and_heads_draw_unlike_uniform_numbers():
    evidence = random_evidence(pads=(0, 0), num_tokens=4000, num_queries=1)
    rows = random(evidence, seeds_B=[0, 1]).values_BHT.flatten(0, 1)
    object.__setattr__(evidence, "layer_idx", 4)
    rows = torch.cat([rows, random(evidence, seeds_B=[0, 1]).values_BHT.flatten(0, 1)])
    assert ((rows >= 0) & (rows < 1)).all()
    assert (rows.mean(1) - 0.5).abs().max() < 4 * 12**-0.5 / 4000**0.5
    correlation = torch.corrcoef(rows) - torch.eye(8)
    assert correlation.abs().max() < 0.07


def test_without_seeds_rows_are_counted_and_wrong_counts_are_refused():
    evidence = random_evidence()
    assert torch.equal(random(evidence).values_BHT, random(evidence, seeds_B=[0, 1]).values_BHT)
    with pytest.raises(ValueError, match="one seed a sequence: got 3 seeds for 2 sequences"):
        random(evidence, seeds_B=[1, 2, 3])
