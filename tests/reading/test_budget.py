"""Pages that a budget of bytes buys: never more bytes than stated, and less than a page a head below."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.budget.statement import Budget
from retain.presets import Policy
from retain.reading import Reading
from retain.reading.budget import ReadLayer, ReadRequest, forced_pages
from tests.refused import refused

LAYERS = (ReadLayer(0, 2, 8, 4), ReadLayer(1, 2, 8, 4), ReadLayer(3, 4, 16, 2))


def request_of(budget, short=0, width=4, **settings_):
    return ReadRequest(Policy("mine", reading=Reading(**settings_)), budget, LAYERS, short, width)


def bytes_of(request, num_seen):
    """Bytes of a step: entries of the pages, and index, counted by loops. The last page may be unfilled."""
    own, total = request.reading, 0
    for place, (layer, pages) in enumerate(zip(LAYERS, request.pages_of(num_seen), strict=True)):
        for _ in range(layer.num_heads):
            if pages is None:
                total += num_seen * layer.entry_bytes
                continue
            tail = num_seen % own.page or own.page
            total += ((pages - 1) * own.page + tail) * layer.entry_bytes + request.index_bytes(
                place, num_seen
            )
    return total


METHODS = {
    "quest": {"by": "quest"},
    "mpcache": {"by": "mpcache", "coarse_page": 16, "sinks": 1},
    "fasa": {"by": "fasa", "dominant_pairs": "dominant_pairs.tsv"},
    "random": {"by": "random", "sinks": 3},
    "recency": {"by": "recency", "recent": 9},
}


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(sorted(METHODS)),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(1, 400),
    st.sampled_from([0.3, 0.5, 0.8, 1.0, 40, 120, 20000]),
)
def test_a_step_reads_no_more_than_is_stated_and_almost_as_much(name, page, whole, num_seen, stated):
    kind = "keep_ratio" if stated <= 1 else "bytes" if stated > 1000 else "tokens_per_head"
    own = {**METHODS[name], "page": page, "whole_layers": whole}
    if name == "mpcache":
        own["coarse_page"] = 4 * page
    request = request_of(Budget(**{kind: stated}), **own)
    try:
        pages = request.pages_of(num_seen)
    except ValueError as error:
        assert re.search("state more, or (a smaller index|fewer reading.whole_layers)", str(error))
        return
    read, most = bytes_of(request, num_seen), request.stated_bytes(num_seen)
    assert read <= most or most >= request.full_bytes(num_seen)
    least = len(forced_pages(num_seen, page, request.reading.sinks, request.reading.recent))
    assert all(own is None or own >= least for own in pages)
    if None not in pages[whole:]:
        spare = sum(layer.num_heads * page * layer.entry_bytes for layer in LAYERS)
        assert most - read < spare


def test_the_index_of_each_method_is_paid_for():
    """100 tokens, layer 3: vectors of 16 numbers of 2 bytes."""
    budget = Budget(keep_ratio=0.5)
    quest = request_of(budget, by="quest", page=16)
    assert quest.index_bytes(2, 100) == 6 * 2 * 32
    fasa = request_of(budget, by="fasa", page=1, pairs=0.5, dominant_pairs="dominant_pairs.tsv")
    assert fasa.num_pairs == 2 and fasa.index_bytes(2, 100) == 100 * 4 * 2
    # 12 full coarse clusters: half of them, or more if half of all entries fill more, and the last two.
    mpcache = request_of(budget, by="mpcache", page=4, coarse_page=8, sinks=1)
    assert mpcache.coarse_of(2, 100) == 7 + 2
    assert mpcache.index_bytes(2, 100) == (12 + 18) * 32
    assert request_of(budget, by="random").index_bytes(2, 100) == 0


def test_pages_that_are_always_read():
    assert forced_pages(20, 4, 5, 1) == {0, 1, 4}
    assert forced_pages(17, 4, 0, 2) == {3, 4}
    assert forced_pages(3, 4, 9, 9) == {0} and forced_pages(0, 4, 1, 1) == set()


def test_a_budget_below_what_is_always_read_is_refused_or_a_short_sequence_read_whole():
    little = Budget(keep_ratio=0.05)
    refused(
        "policy 'mine' may read .* of a sequence of 100 tokens", request_of(little, page=16).pages_of, 100
    )
    assert request_of(little, short=100, page=16).pages_of(100) == (None, None, None)
    with pytest.raises(ValueError, match=r"smaller index \(a larger reading.page"):
        request_of(little, short=99, page=16).pages_of(100)
    taken = request_of(little, page=16, whole_layers=1)
    refused(r"layers that are read whole \(1\) take 12800 bytes: state more", taken.pages_of, 100)


REFUSED = [
    ({"page": 0}, "page"),
    ({"by": "random", "alpha": 0.5}, "alpha is read by 'mpcache' alone, and this is 'random'"),
    ({"by": "fasa"}, "'fasa' looks at the pairs of channels that its table names"),
    ({"by": "mpcache", "page": 5}, "coarse_page 32 is no multiple of page 5"),
]


@pytest.mark.parametrize(("settings_", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused(settings_, message):
    refused(message, Reading, **settings_)


def test_a_policy_that_reads_takes_no_setting_of_one_that_evicts():
    refused(
        "so observed, scope would not be read",
        Policy,
        "mine",
        observed="snapkv",
        scope="layer",
        reading=Reading(),
    )
