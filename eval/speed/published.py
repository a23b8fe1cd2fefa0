"""Published ratios of speed, held against what was measured here: lines that hold or do not.

Their numbers are of A100s and A800s, of models and kernels that are not ours, and of transformers' cache as
it was then. A line that does not hold tells that the ratio is not had here; the times beside it tell why. The
record is of `retain.eval.speed.long`; `plain` is transformers' own cache, `full` ours that keeps everything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PLAIN, FULL = "plain", "full"
PREFILL, DECODE = "prefill_ms", "decode_ms"


@dataclass(frozen=True)
class Published:
    """One published ratio.

    Args:
        source: whose it is, and on which device.
        policy: that it is of.
        what: `prefill_ms`, over the full cache's at most `ratio`; or `decode_ms`, of which the full cache's
            is at least `ratio` times as long.
        ratio: as published.
        tokens: length of the prompts.
        batch: prompts read at once.
        keep_ratio: kept / seen; None: the time does not hang on it.
    """

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


def published(record: Mapping[str, Any]) -> list[str]:
    """A line for each published ratio that a record is about; none if it is about none.

    Args:
        record: of `retain.eval.speed.long`.

    Returns:
        lines that begin with `held`, `**NOT held**` or `**not measured**`.
    """
    lines = []
    for own in PUBLISHED:
        setting, rows = record["setting"], record["lengths"].get(str(own.tokens), {})
        same = own.keep_ratio is None or abs(setting["keep_ratio"] / own.keep_ratio - 1) < 0.01
        if own.policy in rows and setting["batch"] == own.batch and same:
            lines.append(_line(own, rows))
    return lines


def _line(own: Published, rows: Mapping[str, Mapping[str, Any]]) -> str:
    name = "time to first token" if own.what == PREFILL else "decoding"
    wanted = f"at most {own.ratio:g} x" if own.what == PREFILL else f"at least {own.ratio:g} times as fast as"
    at = f"{own.batch} x {own.tokens:,} tokens" if own.batch > 1 else f"{own.tokens:,} tokens"
    claim = f"{own.source}: {name} at {at} {wanted} the full cache"
    failed = [f"{who}: {rows[who]['failed']}" for who in (own.policy, PLAIN) if "failed" in rows[who]]
    if failed:
        return f"**not measured**: {claim}: {'; '.join(failed)}"
    over = rows[own.policy][f"{own.what}_over_{PLAIN}"]
    found, held = _shown(own, over), _ratio(own, over["median"])
    good = held <= own.ratio if own.what == PREFILL else held >= own.ratio
    beside = rows[own.policy].get(f"{own.what}_over_{FULL}")
    also = "" if beside is None else f", {_shown(own, beside)} over our cache that keeps everything"
    return f"{'held' if good else '**NOT held**'}: {claim}: {found} here{also}"


def _ratio(own: Published, over: float) -> float:
    return over if own.what == PREFILL else 1 / over


def _shown(own: Published, over: Mapping[str, float]) -> str:
    low, high = sorted((_ratio(own, over["p20"]), _ratio(own, over["p80"])))
    return f"{_ratio(own, over['median']):.3f} ({low:.3f}..{high:.3f})"
