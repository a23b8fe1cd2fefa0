"""CompressKV: a few query heads of a layer, which look for needles, score entries for all of its heads.

Which they are is measured beforehand (`python -m retain.eval.diagnose.head_tables --table retrieval_heads`).
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from retain.evidence import Evidence, Score, masked_score
from retain.head_tables import row_of
from retain.scores.window import pool_entries, window_received


def compresskv(
    evidence: Evidence,
    *,
    retrieval_heads: str | None = None,
    num_voters: int = 4,
    window: int = 8,
    pool: str | None = "avg",
    pool_size: int = 5,
) -> Score:
    """Score by the pooled mean attention of the window, averaged over the layer's retrieval heads: one score
    for all KV heads.

    `s_h[i] = mean_{q in voters} pool(mean_{j in window} a_qj)[i]`, for every KV head h, where the voters are
    the `num_voters` query heads with the largest numbers in the layer's row of the table, ties to the lower.

    CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before Generation, arXiv
    2508.02401; as in its released code (github.com/TUDa-HWAI/CompressKV), which sums over the window.

    Heads with equal budgets keep the same tokens. Where a layer's entries do not divide by its heads, some
    hold one more, and after several evictions not the same one.

    Args:
        evidence: the layer, with the queries of the window. A voter whose KV head does not hold an entry pays
            it nothing.
        retrieval_heads: a table of query heads (`retain.head_tables`); None: all of them are voters.
        num_voters: of each layer, at least 1; all where there are fewer.

    Returns:
        score in `mass`.

    Raises:
        ValueError: settings out of range, a sequence shorter than the window, or a table of another model.
        FileNotFoundError: no such file.
    """
    Q = evidence.queries_BQSD.shape[1]
    if isinstance(num_voters, bool) or not isinstance(num_voters, int) or num_voters < 1:
        raise ValueError(f"compresskv num_voters is a number of query heads, at least 1; got {num_voters!r}.")
    voters: Sequence[int] = range(Q)
    if retrieval_heads is not None:
        voters = voters_of(row_of("retrieval_heads", retrieval_heads, evidence.layer_idx, Q), num_voters)
    vote_BT = vote(evidence, voters, window=window, pool=pool, pool_size=pool_size)
    values_BHT = vote_BT[:, None].expand(-1, evidence.num_heads, -1)
    return masked_score(values_BHT, evidence.exists_BHT, "mass", window=window)


def voters_of(row: Sequence[float], num_voters: int) -> list[int]:
    """The query heads with the largest numbers, ties to the lower."""
    return sorted(range(len(row)), key=lambda q: (-row[q], q))[:num_voters]


def vote(
    evidence: Evidence, voters: Sequence[int], *, window: int, pool: str | None, pool_size: int
) -> Float[Tensor, "B T"]:
    """Pooled mean attention of the window, averaged over some query heads."""
    (mass_BQT,) = window_received(evidence, window, "sum")
    rows_BVT = mass_BQT[:, list(voters)] / window
    return pool_entries(rows_BVT, pool, pool_size, window=window, place_BT=evidence.place_BT).mean(1)
