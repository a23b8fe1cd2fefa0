"""Stated budgets, in whole entries per sequence and layer."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.statement import Budget, spread
from retain.shapes import LayerShape
from tests.refused import refused

ONE, TWO = [LayerShape(1, 1)], [LayerShape(2, 16)] * 2


@pytest.mark.parametrize(
    ("stated", "lengths", "layers", "entries"),
    [
        *[
            ({"keep_ratio": ratio}, [length], ONE, ((expected,),))
            for ratio, length, expected in ((0.2, 100, 20), (0.1, 1000, 100), (0.29, 100, 29), (0.05, 10, 1))
        ],
        ({"keep_ratio": 0.2}, [100, 33], [LayerShape(2, 1)], ((40,), (13,))),
        # Each layer is rounded, not their sum of 149.4: policies of every scope hold the same.
        ({"keep_ratio": 0.3}, [83], [LayerShape(2, 1)] * 3, ((50, 50, 50),)),
        # Tokens and bytes are capped at what exists.
        ({"tokens_per_head": 30}, [100, 20], [LayerShape(4, 16)], ((120,), (80,))),
        ({"bytes": 1000}, [100, 5], [LayerShape(4, 16)], ((62,), (20,))),
        # Bytes are split over layers in whole entries; unlike layers get half of them each.
        ({"bytes": 1000}, [100], [LayerShape(1, 16)] * 4, ((16, 16, 15, 15),)),
        ({"bytes": 1000}, [100], [LayerShape(2, 16), LayerShape(1, 32)], ((31, 15),)),
        ({"byte_ratio": 0.3}, [137], [LayerShape(3, 512)] * 3, ((123, 123, 123),)),
        ({"byte_ratio": 0.99}, [41], [LayerShape(2, 512)], ((81,),)),
    ],
)
def test_budgets_come_to_whole_entries(stated, lengths, layers, entries):
    totals = spread(Budget(**stated), lengths, layers)
    heads, exist = sum(layer.num_heads for layer in layers), [layer.num_heads for layer in layers]
    assert totals.equal_BL == entries and totals.total_B == [sum(row) for row in entries]
    assert totals.per_head_B == tuple(Fraction(sum(row), heads) for row in entries)
    assert totals.held_BL == tuple(tuple(length * each for each in exist) for length in lengths)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.lists(st.integers(1, 8), min_size=1, max_size=5),
    st.integers(1, 100),
)
def test_no_rounding_drifts(lengths, heads, percent):
    """`round(ratio * n * H)` by integers alone."""
    shapes = [LayerShape(each, 8) for each in heads]
    wanted = [[(2 * percent * n * each + 100) // 200 for each in heads] for n in lengths]
    if any(each < layer for row in wanted for each, layer in zip(row, heads, strict=True)):
        refused("no head may be empty", spread, Budget(keep_ratio=percent / 100), lengths, shapes)
        return
    assert [list(row) for row in spread(Budget(keep_ratio=percent / 100), lengths, shapes).equal_BL] == wanted


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({}, "stated once, as keep_ratio, tokens_per_head, bytes, byte_ratio or threshold; got none"),
        ({"keep_ratio": 0.5, "bytes": 3}, "got keep_ratio=0.5, bytes=3"),
        ({"keep_ratio": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"tokens_per_head": 0}, "tokens_per_head is a whole number of at least 1; got 0"),
        ({"keep_ratio": float("nan")}, "keep_ratio is a number; got nan"),
        ({"tokens_per_head": True}, "tokens_per_head is a number; got True"),
        ({"threshold": float("-inf")}, "threshold is a number; got -inf"),
    ],
)
def test_bad_budgets_are_refused(stated, message):
    refused(message, Budget, **stated)


def test_a_budget_that_would_empty_a_head_is_refused():
    said = "sequence 1 of 5 tokens gets 1 entries for the 2 KV heads of layer 0.*one entry a"
    refused(said, spread, Budget(keep_ratio=0.1), [100, 5], [LayerShape(2, 4)])
    said = "gets 0 entries for the 1 KV heads of layer 3"
    refused(said, spread, Budget(bytes=48), [100], [LayerShape(1, 16)] * 4)
    layers = [LayerShape(2, 16, metadata_bytes=4)] * 2
    assert spread(Budget(keep_ratio=0.0125), [100], layers).equal_BL == ((2, 2),)
    # A head that has entries keeps one; a layer that has none wants none.
    one, few = [LayerShape(2, 4)], Budget(keep_ratio=0.1)
    assert spread(few, [5, 0], one, [[0], [0]]).total_B == [0, 0]
    assert spread(few, [5], one, [[1]]).total_B == [1]
    refused("sequence 0 of 5 tokens gets 1 entries for the 2 KV heads", spread, few, [5], one, [[2]])


def test_a_budget_is_what_is_stated_or_all_that_there_is():
    totals = spread(Budget(tokens_per_head=30), [100, 100, 100], TWO, [[120, 20], [60, 60], [0, 0]])
    assert totals.equal_BL == ((60, 60),) * 3 and totals.stated_B == [120] * 3
    assert totals.held_BL == ((120, 20), (60, 60), (0, 0))
    assert totals.total_B == [120, 120, 0] and totals.per_head_B == (30,) * 3
    assert spread(Budget(bytes=640), [100], TWO, [[15, 15]]).total_B == [30]
    # A ratio is of the length, whatever is left.
    for length, held, stated in ((100, 200, 40), (100, 44, 40), (400, 44, 160), (115, 44, 46)):
        totals = spread(Budget(keep_ratio=0.2), [length], TWO[:1], [[held]])
        assert totals.stated_B == [stated] and totals.total_B == [min(stated, held)]
        assert totals.per_head_B == (Fraction(stated, 2),)
    # A threshold states nothing.
    assert spread(Budget(threshold=-1.5), [10], TWO).total_B == [40]
    assert spread(Budget(threshold=0.1), [10], TWO, [[7, 3]]).equal_BL == ((7, 3),)


@pytest.mark.parametrize("sizes", [(16, 16, 16), (512, 512, 256)])
@pytest.mark.parametrize(
    "stated",
    [
        *({"keep_ratio": each} for each in (0.02, 0.37, 0.999)),
        *({"tokens_per_head": each} for each in (9, 732)),
        *({"bytes": each} for each in (5000, 77_777)),
    ],
    ids=str,
)
def test_metadata_of_entries_is_paid_for(stated, sizes):
    """As many bytes as without, but for less than an entry a layer, and not more than are stated."""
    layers = [LayerShape(2, size) for size in sizes]
    entries, paid = (
        spread(Budget(**stated), [733], [replace(each, metadata_bytes=extra) for each in layers]).equal_BL[0]
        for extra in (0, 4)
    )
    plain = sum(each * size for each, size in zip(entries, sizes, strict=True))
    now = sum(each * (size + 4) for each, size in zip(paid, sizes, strict=True))
    if sum(entries) == 733 * 2 * len(sizes):  # all fits, nothing goes, and nothing stands beside it
        assert paid == entries
        return
    most = stated.get("bytes", plain + max(sizes) - min(sizes))
    assert most - 4 * (max(sizes) + 4) < now <= most
