"""Scores of pages, each against its formula by loops in float64, and the index of a page."""

import pytest
import torch

from retain.cache.store import RaggedStore
from retain.head_tables import format_table
from retain.reading.baselines import random_scores, recency_scores
from retain.reading.fasa import dominant_channels, pair_scores
from retain.reading.mpcache import clusters, inside, mixed, mixed_scores
from retain.reading.page_index import PageIndex
from retain.reading.quest import bound_scores, bounds

R, G, D, PAGE = 3, 2, 4, 3


def made(tokens, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(R, G, D, generator=draw, dtype=torch.float64),
        torch.randn(R, tokens, D, generator=draw, dtype=torch.float64),
    )


def test_quest_scores_a_page_by_the_largest_product_that_its_box_allows():
    queries, keys = made(12)
    pages = keys.unflatten(1, (-1, PAGE))
    got = bound_scores(queries, torch.stack([bounds(row) for row in pages]))
    for r in range(R):
        for g in range(G):
            for p in range(4):
                want = 0.0
                for d in range(D):
                    column = [float(keys[r, i, d]) for i in range(p * PAGE, (p + 1) * PAGE)]
                    q = float(queries[r, g, d])
                    want += max(q * max(column), q * min(column))
                assert float(got[r, g, p]) == pytest.approx(want)
                assert all(float(queries[r, g] @ pages[r, p, i]) <= want + 1e-12 for i in range(PAGE))


def test_mpcache_scores_a_cluster_by_one_vector():
    queries, keys = made(12)
    got = mixed_scores(queries, torch.stack([mixed(row, 0.6) for row in keys.unflatten(1, (-1, PAGE))]))
    for r in range(R):
        for g in range(G):
            for p in range(4):
                want = 0.0
                for d in range(D):
                    column = [float(keys[r, i, d]) for i in range(p * PAGE, (p + 1) * PAGE)]
                    want += float(queries[r, g, d]) * (0.6 * max(column) + 0.4 * min(column))
                assert float(got[r, g, p]) == pytest.approx(want)


def test_mpcache_looks_at_fine_clusters_inside_the_coarse_ones():
    score = torch.arange(5.0)[None]
    got = inside(score, torch.tensor([[False, True, True]]), 2)
    assert got.tolist() == [[float("-inf"), float("-inf"), 2.0, 3.0, 4.0]]


def test_fasa_adds_up_the_products_of_the_dominant_pairs(tmp_path):
    """Of 2 pairs a head, channel f with channel f + 2; the first head's second pair agrees best, of the other
    head's equal ones the first is taken."""
    path = tmp_path / "dominant_pairs.tsv"
    path.write_text(format_table([[0.25, 0.5, 0.75, 0.75]], [0]))
    channels = dominant_channels(str(path), 0, 2, 1, 2)
    assert channels.tolist() == [[1, 3], [0, 2]]
    queries, keys = made(5)
    channels = torch.stack([channels[0], channels[1], channels[0]])
    read = keys.gather(2, channels[:, None].expand(-1, 5, -1))
    got = pair_scores(queries, read, channels)
    for r in range(R):
        for g in range(G):
            for t in range(5):
                want = sum(float(queries[r, g, c] * keys[r, t, c]) for c in channels[r].tolist())
                assert float(got[r, g, t]) == pytest.approx(want)
    with pytest.raises(ValueError, match="for layer 1, which shows 4 pairs of KV heads"):
        dominant_channels(str(path), 1, 2, 1, 2)


def test_random_pages_are_drawn_anew_for_each_query_and_alike_in_any_batch():
    both = random_scores([7, 9], 1, 2, [20, 30], 50)
    assert torch.equal(random_scores([9], 1, 2, [30], 50), both[2:])
    others = [random_scores([9], *other, 50) for other in ((1, 2, [31]), (2, 2, [30]))]
    assert all(not torch.equal(other, both[2:]) for other in others)
    assert both.unique().numel() > 190 and 0.4 < float(both.mean()) < 0.6
    assert recency_scores(2, 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_an_index_is_added_to_page_by_page_and_equals_one_made_at_once():
    """Rows fill pages at different times; only the keys of pages that have filled are looked at."""
    _, keys = made(20)
    looked = []

    def summarise(keys_NpD):
        looked.append(int(keys_NpD.flatten(1).any(1).sum()))  # room is made with a page of zeros
        return bounds(keys_NpD)

    index = PageIndex(PAGE, summarise)
    valid = torch.arange(8) >= torch.tensor([[0], [2], [1]])
    first = keys[:, None, :8]
    store = RaggedStore.from_dense(first, first, torch.arange(8).expand(R, -1), valid[:, None])
    lengths = store.lengths_R.tolist()
    index.update(store, lengths)
    assert index.counts == [2, 2, 2]
    for step in range(8, 20):
        new = keys[:, None, step : step + 1]
        store.append_(new, new, torch.full((R, 1), step))
        lengths = [length + 1 for length in lengths]
        got = index.update(store, lengths)
    made_at_once = PageIndex(PAGE, bounds).update(store, lengths)
    for row, length in enumerate(lengths):
        assert torch.equal(got[row, : length // PAGE], made_at_once[row, : length // PAGE])
    assert sum(looked) == 18 and index.counts == [6, 6, 6]


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 0]])
def test_an_index_follows_its_rows_and_forks(rows):
    _, keys = made(9)
    own = keys[:, None]
    store = RaggedStore.from_dense(
        own, own, torch.arange(9).expand(R, -1), torch.ones(R, 1, 9, dtype=torch.bool)
    )
    index = clusters(PAGE, 0.6)
    whole = index.update(store, [9] * R)
    other = index.fork()
    other.select(rows)
    assert torch.equal(other.update(store.select_batch(torch.tensor(rows)), [9] * len(rows)), whole[rows])
    other.held.zero_()
    assert torch.equal(index.update(store, [9] * R), whole) and bool(whole.any())
    index.forget()
    assert index.num_bytes == 0 and torch.equal(index.update(store, [9] * R), whole)
