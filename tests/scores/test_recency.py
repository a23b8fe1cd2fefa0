from retain.scores import recency
from tests.naive import random_evidence


def test_recency_is_the_place_among_the_valid_entries():
    evidence = random_evidence(pads=(0, 4))
    score = recency(evidence).values_BHT
    for b in range(2):
        for h in range(2):
            for i in range(14):
                valid = evidence.valid_BT[b]
                place = sum(bool(valid[k]) for k in range(i)) if valid[i] else float("-inf")
                assert float(score[b, h, i]) == place
