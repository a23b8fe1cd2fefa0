"""Holds published ratios of speed against a record of the benchmark `long`: lines that hold or do not.

The published numbers are of A100s and A800s, of other models and kernels, and of transformers' cache as it
was then. A line that does not hold says that the ratio is not reached here; the times beside it say why.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from retain.eval.speed.caches import FULL, PLAIN

PREFILL, DECODE = "prefill", "token"


class Published(NamedTuple):
    """One published ratio: of `prefill`, whose time is at most `ratio` of the full cache's, or of a `token`,
    for which the full cache takes at least `ratio` times as long. Without a `keep_ratio` the time does not
    hang on it."""

    source: str
    policy: str
    what: str
    ratio: float
    tokens: int
    batch: int
    keep_ratio: float | None = None


PUBLISHED = (
    # arXiv 2502.03805: 3.54 s without eviction, 3.60 s with it; 0.0828 s and 0.0332 s a token.
    Published("CriticalKV (A100)", "criticalkv", PREFILL, 1.017, 32768, 1),
    Published("SnapKV, as CriticalKV's authors measured it (A100)", "snapkv", DECODE, 2.49, 32768, 4, 0.4),
    # "More than nine times" at 128K tokens; here with the largest of its published budgets, 1,024 a head.
    Published("LAVa (A800)", "lava", DECODE, 9.0, 131072, 1, 1024 / 131072),
)


def published(setting: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each published ratio that rows are about.

    Args:
        setting: their `batch` and `keep_ratio`.
        rows: of the benchmark `long`.

    Returns:
        lines that begin with `held`, `**NOT held**` or `**not measured**`.
    """
    lines = []
    for own in PUBLISHED:
        here = {row["policy"]: row for row in rows if row["tokens"] == own.tokens}
        same = own.keep_ratio is None or abs(setting["keep_ratio"] / own.keep_ratio - 1) < 0.01
        if own.policy in here and setting["batch"] == own.batch and same:
            lines.append(_line(own, here))
    return lines


def _line(own: Published, rows: Mapping[str, Mapping[str, Any]]) -> str:
    prefill = own.what == PREFILL
    what = "time to first token" if prefill else "decoding"
    bound = f"at most {own.ratio:g} x" if prefill else f"at least {own.ratio:g} times as fast as"
    prompts = f"{own.batch} x {own.tokens:,}" if own.batch > 1 else f"{own.tokens:,}"
    claim = f"{own.source}: {what} at {prompts} tokens {bound} the full cache"
    failed = [f"{who}: {rows[who]['failed']}" for who in (own.policy, PLAIN) if rows[who].get("failed")]
    if failed:
        return f"**not measured**: {claim}: {'; '.join(failed)}"

    def shown(over: Mapping[str, float]) -> tuple[float, str]:
        median, *ends = (over[key] if prefill else 1 / over[key] for key in ("median", "p20", "p80"))
        return median, f"{median:.3f} ({min(ends):.3f}..{max(ends):.3f})"

    over, beside = (rows[own.policy].get(f"{own.what}_over_{other}") for other in (PLAIN, FULL))
    assert over is not None
    median, text = shown(over)
    good = median <= own.ratio if prefill else median >= own.ratio
    also = "" if beside is None else f", {shown(beside)[1]} over our cache that keeps everything"
    return f"{'held' if good else '**NOT held**'}: {claim}: {text} here{also}"
