"""Published ratios of speed: which records they are about, and which way each of them holds."""

from typing import Any

import pytest

from retain.eval.speed.long import DECODE, PREFILL, PUBLISHED, published
from retain.kernels.gpu_plan import STEPS


def lines_of(
    policy: str, what: str, over: float, *, tokens: int, lost: bool = False, **setting: Any
) -> list[str]:
    def around(median: float) -> dict[str, float]:
        return {"p20": median - 0.005, "median": median, "p80": median + 0.005}

    row = {f"{what}_over_plain": around(over), f"{what}_over_full": around(0.5)}
    sides = {"plain": {"failed": "out of memory" * lost}, "full": {}, policy: row}
    return published(setting, [{"policy": name, "tokens": tokens, **own} for name, own in sides.items()])


@pytest.mark.parametrize(
    ("policy", "what", "at", "good", "bad"),
    [
        ("criticalkv", PREFILL, {"tokens": 32768, "batch": 1, "keep_ratio": 0.2}, 1.01, 1.02),
        ("snapkv", DECODE, {"tokens": 32768, "batch": 4, "keep_ratio": 0.4}, 0.4, 0.41),
        ("lava", DECODE, {"tokens": 131072, "batch": 1, "keep_ratio": 0.0078125}, 0.1, 0.12),
    ],
)
def test_each_line_holds_on_its_side_of_the_published_ratio(
    policy: str, what: str, at: dict[str, Any], good: float, bad: float
) -> None:
    (held,), (other,) = (lines_of(policy, what, over, **at) for over in (good, bad))
    assert held.startswith("held: ") and other.startswith("**NOT held**: ")
    shown = f"{good:.3f}" if what == PREFILL else f"{1 / good:.3f}"
    assert f"the full cache: {shown} (" in held and " over our cache that keeps everything" in held
    assert f"{at['tokens']:,} tokens" in held
    for change in ({"tokens": 4096}, {"batch": 2}):
        assert lines_of(policy, what, good, **{**at, **change}) == []
    elsewhere = lines_of(policy, what, good, **{**at, "keep_ratio": 0.9})
    assert bool(elsewhere) == (policy == "criticalkv"), "its time does not hang on the budget"
    (lost,) = lines_of(policy, what, good, lost=True, **at)
    assert lost.startswith("**not measured**: ") and lost.endswith("plain: out of memory")


def test_percentiles_stand_in_their_order() -> None:
    (line,) = lines_of("snapkv", DECODE, 0.25, tokens=32768, batch=4, keep_ratio=0.4)
    assert (
        "at 4 x 32,768 tokens at least 2.49 times as fast as the full cache: 4.000 (3.922..4.082) here"
        in line
    )


def test_the_plan_of_a_gpu_measures_each_of_them() -> None:
    commands = [step.command.split() for step in STEPS if "--what long" in step.command]
    settings = [dict(zip(words[3::2], words[4::2], strict=True)) for words in commands]
    for own in PUBLISHED:
        assert any(
            given["--tokens"] == str(own.tokens)
            and given.get("--batch", "1") == str(own.batch)
            and own.policy in given["--policies"].split(",")
            and own.keep_ratio in (None, float(given.get("--keep-ratio", "0.2")))
            for given in settings
        ), own
