"""Shares and packs: every document exactly once, and no pack or share beyond its limit."""

from hypothesis import given
from hypothesis import strategies as st

from retain.train.data.document import Document
from retain.train.data.packing import packs, packs_of, shares_of

lengths = st.lists(st.integers(1, 40), max_size=25)


def documents_of(lengths: list[int]) -> list[Document]:
    return [Document((i,) * (length - length // 3), (i,) * (length // 3)) for i, length in enumerate(lengths)]


@given(lengths=lengths, micro_batch=st.integers(1, 6), limit=st.integers(0, 60), order=st.randoms())
def test_packs_hold_every_document_once_and_keep_their_limits(
    lengths: list[int], micro_batch: int, limit: int, order: object
) -> None:
    documents = documents_of(lengths)
    packed = packs(documents, micro_batch=micro_batch, tokens_per_pack=limit)
    assert sorted(d.key for pack in packed for d in pack) == sorted(d.key for d in documents)
    sizes = [sum(d.num_tokens for d in pack) for pack in packed]
    assert all(1 <= len(pack) <= micro_batch for pack in packed)
    assert not limit or all(s <= limit or len(p) == 1 for s, p in zip(sizes, packed, strict=True))
    # First fit: no document had room in an earlier pack (packs only grew since).
    for i, pack in enumerate(packed):
        for earlier, size in zip(packed[:i], sizes[:i], strict=True):
            first = pack[0].num_tokens
            assert len(earlier) == micro_batch or (limit and size + first > limit)
    again = list(documents)
    order.shuffle(again)  # type: ignore[attr-defined]
    assert packs(again, micro_batch=micro_batch, tokens_per_pack=limit) == packed


def test_packs_by_hand() -> None:
    nine, seven, five, three, two = documents = documents_of([9, 7, 5, 3, 2])
    assert packs(documents, micro_batch=5, tokens_per_pack=10) == [[nine], [seven, three], [five, two]]
    # A repeat prompt doubles what a document takes up.
    doubled = packs(documents, micro_batch=5, tokens_per_pack=10, size_of=lambda d: 2 * d.num_tokens)
    assert doubled == [[nine], [seven], [five], [three, two]]
    assert packs([], micro_batch=1) == []


@given(lengths=lengths, num_processes=st.integers(1, 5))
def test_shares_are_disjoint_complete_and_balanced(lengths: list[int], num_processes: int) -> None:
    documents = documents_of(lengths)
    shares = shares_of(documents, num_processes)
    assert sorted(d.key for share in shares for d in share) == sorted(d.key for d in documents)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    # Never worse than dealing out by falling length by more than the longest document.
    ordered = sorted(lengths, reverse=True)
    dealt = max((sum(ordered[p::num_processes]) for p in range(num_processes)), default=0)
    assert max(sum(d.num_tokens for d in share) for share in shares) <= dealt + max(lengths, default=0)


def test_shares_by_hand() -> None:
    six, two, ten, four, eight, three = documents = documents_of([6, 2, 10, 4, 8, 3])
    assert shares_of(documents, 2) == [[ten, four, three], [eight, six, two]]
    assert shares_of([six], 2) == [[six], []]
    # One process has a document of nearly all tokens, and still its share of the others.
    assert [*map(len, shares_of(documents_of([20, 3, 3, 2, 2, 1, 1]), 3))] == [2, 3, 2]
    # By what a document takes up in a row, where that is not its own tokens.
    sizes = {six: 1, two: 40, ten: 2, four: 3, eight: 4, three: 30}
    assert shares_of(documents, 2, sizes.__getitem__) == [[two, ten, six], [three, eight, four]]


@given(lengths=lengths.filter(len), num_processes=st.integers(1, 4), micro_batch=st.integers(1, 3))
def test_in_lockstep_every_process_runs_as_many_forwards_as_the_slowest(
    lengths: list[int], num_processes: int, micro_batch: int
) -> None:
    documents = documents_of(lengths)
    limits = {"micro_batch": micro_batch, "tokens_per_pack": 30}
    alone, together = (
        [
            packs_of(documents, process=p, num_processes=num_processes, lockstep=lockstep, **limits)
            for p in range(num_processes)
        ]
        for lockstep in (False, True)
    )
    assert {len(one) for one in together} == {max(map(len, alone))}
    assert [[pack for pack in one if pack[1]] for one in together] == alone
    counted = [d.key for one in alone for pack, _ in one for d in pack]
    assert sorted(counted) == sorted(d.key for d in documents)
    assert all(pack for one in together for pack, _ in one)
