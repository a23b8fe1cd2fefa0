from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.protection import Protection, pinned_mask, pins_per_sequence, protected_mask
from tests.refused import refused


def _valid(*lengths: int) -> torch.Tensor:
    width = max(lengths)
    return torch.arange(width) >= width - torch.tensor(lengths)[:, None]


def test_a_budget_below_the_protected_count_says_by_how_much():
    protection = Protection(sinks=4, recent=32)
    with pytest.raises(
        ValueError, match=r"sequence 1 has a budget of 30 entries per head, 6 fewer than the 36 protected"
    ):
        protected_mask(protection, _valid(300, 100), [60, 30])
    # A fraction short is short: 36 protected do not fit in 35.5.
    with pytest.raises(ValueError, match=r"35.5 entries per head, 1 fewer than the 36 protected"):
        protected_mask(protection, _valid(100), [Fraction(71, 2)])
    assert protected_mask(protection, _valid(20), [20]).all()


def _count(fraction, minimum, budget):
    """A prefix or a suffix in entries, as the formula has it."""
    return max(minimum, int(Fraction(str(fraction)) * budget)) if fraction else 0


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_mask_is_its_formula_with_every_field(data):
    draw = data.draw
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    budgets = [draw(st.fractions(5, 45, max_denominator=2)) for _ in lengths]
    protection = Protection(
        sinks=draw(st.integers(0, 4)),
        prefix_fraction=draw(st.sampled_from([0.0, 0.1, 0.25])),
        suffix_fraction=draw(st.sampled_from([0.0, 0.1, 0.3])),
        minimum=draw(st.integers(0, 4)),
        recent=draw(st.integers(0, 6)),
    )
    valid = _valid(*lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    pinned = torch.rand(valid.shape, generator=generator) < 0.1 if draw(st.booleans()) else None
    wanted = []
    for row, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
        p = protection
        first = max(p.sinks, _count(p.prefix_fraction, p.minimum, budget))
        suffix = _count(p.suffix_fraction, p.minimum, budget)
        start = valid.shape[1] - length
        each = []
        for i in range(valid.shape[1]):
            place = i - start
            ends = place < first or place >= length - p.recent or place >= length - suffix
            each.append(place >= 0 and (ends or (pinned is not None and bool(pinned[row, i]))))
        wanted.append(each)
    over = [sum(each) - budget for each, budget in zip(wanted, budgets, strict=True)]
    if max(over) > 0:
        said = "fewer than the .* protected"
        refused(said, protected_mask, protection, valid, budgets, pinned_BT=pinned)
    else:
        assert protected_mask(protection, valid, budgets, pinned_BT=pinned).tolist() == wanted


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(0, 10**6), st.booleans())
def test_what_some_head_has_lost_is_not_protected_and_takes_nothing_of_the_budget(seed, pins):
    draw = torch.Generator().manual_seed(seed)
    valid = _valid(30, 12)
    intact, pinned = torch.rand(2, 2, 30, generator=draw) < torch.tensor([0.6, 0.2])[:, None, None]
    protection = Protection(3, 0.1, 0.2, 2, 4)
    settings = {"pinned_BT": pinned if pins else None}
    mask = protected_mask(protection, valid, [20, 12], **settings) & intact
    got = protected_mask(protection, valid, [20, 12], **settings, intact_BT=intact)
    assert torch.equal(got, mask)
    # As many tokens a head as are protected and still there are enough: no fraction, so that none shrinks.
    fixed = replace(protection, prefix_fraction=0.0, suffix_fraction=0.0)
    counts = protected_mask(fixed, valid, [30, 30], **settings, intact_BT=intact).sum(-1).tolist()
    assert protected_mask(fixed, valid, counts, **settings, intact_BT=intact).sum(-1).tolist() == counts
    if counts[1]:
        message = f"sequence 1 has a budget of {counts[1] - 1} .*, 1 fewer than the {counts[1]} protected"
        with pytest.raises(ValueError, match=message):
            protected_mask(fixed, valid, [counts[0], counts[1] - 1], **settings, intact_BT=intact)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_pinned_spans_are_counted_in_the_tokens_of_a_sequence(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    shared = data.draw(st.booleans())
    tops = [min(lengths)] if shared else lengths
    rows = [
        data.draw(
            st.lists(
                st.tuples(st.integers(0, top), st.integers(0, top)).map(sorted).filter(lambda s: s[0] < s[1]),
                max_size=3,
            )
        )
        for top in tops
    ]
    valid = _valid(*lengths)
    mask = pinned_mask(pins_per_sequence(rows[0] if shared else rows, len(lengths)), valid)
    for row, length in enumerate(lengths):
        start = valid.shape[1] - length
        for i in range(valid.shape[1]):
            spans = rows[0] if shared else rows[row]
            assert bool(mask[row, i]) is any(first <= i - start < stop for first, stop in spans)


def test_bad_spans_are_named_all_at_once():
    said = (
        r"spans: span \(2, 2\) of sequence 0, which has 6 tokens; span \(3, 1\) of sequence 0, .*; "
        r"span \(2, 5\) of sequence 1, which has 4 tokens; span \(-1, 2\) of sequence 1, "
    )
    refused(said, pinned_mask, [[(2, 2), (3, 1), (0, 6)], [(2, 5), (-1, 2)]], _valid(6, 4))
    refused("got 3 pinned span lists for 2 sequences", pins_per_sequence, [[], [], [(0, 1)]], 2)
    refused("must be one list of", pins_per_sequence, [(0, 1), [(0, 1)]], 2)
