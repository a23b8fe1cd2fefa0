"""Assigns a step's documents to processes, and to packs that share a forward pass.

Both depend on the documents' sizes alone, so every process knows what all others do, and nothing is
exchanged. A pack is one row without padding, in which every document attends to itself alone
(`retain.train.teacher.walk`); so packing changes speed and memory, and numbers only by rounding.
"""

from collections.abc import Callable, Sequence

from retain.train.data.document import Document

Size = Callable[[Document], int]


def plain_size(document: Document) -> int:
    """Returns the tokens of a document and its appendix."""
    return document.num_tokens


def shares_of(
    documents: Sequence[Document], num_processes: int, size_of: Size = plain_size
) -> list[list[Document]]:
    """The part of each process: longest first, each to the process with the fewest tokens (`size_of`) so far.
    Every document falls to exactly one process, and the numbers of documents differ by at most one."""
    room, rest = divmod(len(documents), num_processes)
    shares: list[list[Document]] = [[] for _ in range(num_processes)]
    tokens = [0] * num_processes
    larger = 0  # processes with one document more than the others; `rest` of them in the end
    for document in _longest_first(documents, size_of):
        open_to = [i for i, share in enumerate(shares) if len(share) < room + (larger < rest)]
        chosen = min(open_to, key=lambda i: (tokens[i], i))
        shares[chosen].append(document)
        tokens[chosen] += size_of(document)
        larger += len(shares[chosen]) > room
    return shares


def packs(
    documents: Sequence[Document], *, micro_batch: int, tokens_per_pack: int = 0, size_of: Size = plain_size
) -> list[list[Document]]:
    """Documents that share a forward pass: first-fit decreasing, the longest document first, each into the
    first pack that has room for it (at most 11/9 of the fewest packs that would do, Johnson 1973).

    Args:
        micro_batch: most documents of a pack.
        tokens_per_pack: most tokens of a pack (0 = any number). A document that is longer has its own pack.
    """
    filled: list[list[Document]] = []
    tokens: list[int] = []
    for document in _longest_first(documents, size_of):
        size = size_of(document)
        for place, pack in enumerate(filled):
            fits = not tokens_per_pack or tokens[place] + size <= tokens_per_pack
            if fits and len(pack) < micro_batch:
                pack.append(document)
                tokens[place] += size
                break
        else:
            filled.append([document])
            tokens.append(size)
    return filled


def packs_of(
    documents: Sequence[Document],
    *,
    process: int,
    num_processes: int,
    lockstep: bool = False,
    size_of: Size = plain_size,
    **limits: int,
) -> list[tuple[list[Document], bool]]:
    """The packs (of these `limits`) of one process's share of a step, each with whether it counts.

    In `lockstep`, where the frozen model is sharded, every process must run as many forwards as the one that
    has most: one with fewer walks its last pack again for nothing.
    """
    shares = shares_of(documents, num_processes, size_of)
    each = [packs(share, size_of=size_of, **limits) for share in shares]
    mine = [(pack, True) for pack in each[process]]
    if lockstep:
        again = mine[-1][0] if mine else list(documents[:1])
        mine += [(again, False)] * (max(map(len, each)) - len(mine))
    return mine


def _longest_first(documents: Sequence[Document], size_of: Size) -> list[Document]:
    """By falling size, equal ones by their hash: the order that they come in is no matter."""
    return sorted(documents, key=lambda document: (-size_of(document), document.key))
