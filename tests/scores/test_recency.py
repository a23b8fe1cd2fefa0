from retain.scores import recency
from tests.naive import naive_scores, random_evidence


def test_recency_is_the_place_among_the_valid_entries():
    evidence = random_evidence(pads=(0, 4))
    naive = naive_scores(evidence, lambda b, h, i: int(evidence.valid_BT[b, :i].sum()))
    assert recency(evidence).values_BHT.tolist() == naive.tolist()
