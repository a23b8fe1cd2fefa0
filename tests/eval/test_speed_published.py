"""Published ratios of speed: which records they are about, and which way each of them holds."""

from typing import Any

import pytest

from retain.eval.speed import long as speed_long
from retain.eval.speed import published as speed_published
from retain.eval.speed.long import Setting, table
from retain.eval.speed.published import DECODE, PREFILL, PUBLISHED, Published, published

TINY: dict[str, Any] = {
    **{"tokens": "128,200", "policies": "snapkv", "steps": 2, "batch": 2, "layers": 2, "width": 32},
    **{"heads": 4, "kv_heads": 2, "intermediate": 48, "keep_ratio": 0.7, "rounds": 2, "warmup": 0},
    **{"threads": 1, "dtype": "float32", "device": "cpu"},
}


def around(median: float) -> dict[str, float]:
    return {"p20": median - 0.005, "median": median, "p80": median + 0.005}


def record(
    policy: str, what: str, over: float, *, tokens: int, batch: int, keep_ratio: float
) -> dict[str, Any]:
    row = {f"{what}_over_plain": around(over), f"{what}_over_full": around(0.5)}
    return {
        "setting": {"batch": batch, "keep_ratio": keep_ratio},
        "lengths": {str(tokens): {"plain": {}, "full": {}, policy: row}},
    }


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
    (held,), (other,) = (published(record(policy, what, over, **at)) for over in (good, bad))
    assert held.startswith("held: ") and other.startswith("**NOT held**: ")
    shown = f"{good:.3f}" if what == PREFILL else f"{1 / good:.3f}"
    assert f"the full cache: {shown} (" in held and " over our cache that keeps everything" in held
    assert f"{at['tokens']:,} tokens" in held
    for change in ({"tokens": 4096}, {"batch": 2}):
        assert published(record(policy, what, good, **{**at, **change})) == []
    elsewhere = published(record(policy, what, good, **{**at, "keep_ratio": 0.9}))
    assert bool(elsewhere) == (policy == "criticalkv"), "its time does not hang on the budget"


def test_percentiles_stand_in_their_order_and_a_side_that_failed_is_said() -> None:
    at: dict[str, Any] = {"tokens": 32768, "batch": 4, "keep_ratio": 0.4}
    found = record("snapkv", DECODE, 0.25, **at)
    (line,) = published(found)
    assert (
        "at 4 x 32,768 tokens at least 2.49 times as fast as the full cache: 4.000 (3.922..4.082) here"
        in line
    )
    found["lengths"]["32768"]["plain"] = {"failed": "out of memory"}
    (line,) = published(found)
    assert line.startswith("**not measured**: SnapKV") and line.endswith("plain: out of memory")


def test_the_plan_of_a_gpu_measures_each_of_them() -> None:
    from retain.kernels.gpu_plan import STEPS

    commands = [step.command.split() for step in STEPS if "speed.long" in step.command]
    settings = [dict(zip(words[5::2], words[6::2], strict=True)) for words in commands]
    for own in PUBLISHED:
        assert any(
            given["--tokens"] == str(own.tokens)
            and given.get("--batch", "1") == str(own.batch)
            and own.policy in given["--policies"].split(",")
            and own.keep_ratio in (None, float(given.get("--keep-ratio", "0.2")))
            for given in settings
        ), own


def test_a_benchmark_prints_the_lines_that_it_is_about(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tuple(
        Published("somebody", "snapkv", what, ratio, 200, 2, 0.7)
        for what, ratio in ((PREFILL, 1e9), (PREFILL, 1e-9), (DECODE, 1e-9), (DECODE, 1e9))
    )
    monkeypatch.setattr(speed_published, "PUBLISHED", lines)
    found = speed_long.benchmark(Setting(**TINY))
    assert [line.partition(":")[0] for line in found["published"]] == ["held", "**NOT held**"] * 2
    assert table(found).endswith("\n".join([*found["published"], ""]))


def test_attention_of_a_package_that_is_installed_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here the device is only said to be one when sides are made."""
    setting = Setting(**{**TINY, "tokens": "128"})
    model, twin = (speed_long.speed.build_model(setting.shape()) for _ in range(2))
    names = {"json": "eager", "no_such_package": "sdpa", "math": "flash_attention_2"}
    monkeypatch.setattr(speed_long, "ATTENTIONS", names)
    with speed_long.attach(model):
        gates = speed_long.random_gates(model)
        assert [side.name for side in speed_long.sides_of(setting, model, twin, gates)] == [
            "plain",
            "full",
            "snapkv",
        ]
        object.__setattr__(setting, "device", "cuda")
        sides = speed_long.sides_of(setting, model, twin, gates)
    *_, eager, flash = sides
    assert [side.name for side in sides[3:]] == ["plain, eager", "plain, flash_attention_2"]
    assert eager.model.config._attn_implementation == "eager" and not eager.failed
    assert twin.config._attn_implementation == "sdpa" and flash.failed
    assert next(eager.model.parameters()) is next(twin.parameters())
