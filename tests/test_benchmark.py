"""The protocol of benchmarks (turns, neighbours, rounds) and their command (options, record, table)."""

import gc
import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch

from retain.process import benchmark
from retain.process.benchmark import Benchmark, Column, Settings, grid, heading, main
from retain.process.timing import Case, GivenUp, interleave, quiet, spread, timed


def made(*names: str, **failing: Exception) -> tuple[list[Case], list[str]]:
    """Cases that note when they run, the first as the neighbour of the others."""
    order: list[str] = []

    def run(name: str) -> dict[str, float]:
        order.append(name)
        if name in failing:
            raise failing[name]
        return {"ms": float(len(order))}

    first = Case(call=lambda: run(names[0]))
    return [first, *(Case(call=lambda name=name: run(name), beside=first) for name in names[1:])], order


def test_cases_take_turns_and_each_is_before_and_behind_its_neighbour() -> None:
    cases, order = made("plain", "a", "b", "c")
    ended: list[int] = []
    interleave(cases, rounds=2, warmup=1, after_round=lambda: ended.append(len(order)))
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert pairs == [
        *(("plain", "c"), ("plain", "a"), ("plain", "b")),
        *(("a", "plain"), ("b", "plain"), ("c", "plain")),
        *(("plain", "b"), ("plain", "c"), ("plain", "a")),
    ]
    assert ended == [6, 12, 18]
    plain, a, b, _ = cases
    assert a.times("ms") == [7.0, 18.0] and len(plain.runs) == 6, "what warms up does not count"
    assert a.over(plain, "ms") == [7 / 8, 18 / 17], "over the run next to it"
    assert a.over(b, "ms") == [7 / 9, 18 / 14], "over the run of the same round"
    alone: list[str] = []
    interleave([Case(call=lambda one=one: alone.append(one) or {}) for one in "abc"], rounds=3, warmup=0)
    assert "".join(alone) == "abcbcacab", "without neighbours they rotate"


@pytest.mark.parametrize(
    ("error", "said"),
    [(torch.OutOfMemoryError("CUDA"), "out of memory"), (GivenUp("no library"), "no library")],
)
def test_a_case_that_fails_says_why_and_the_others_go_on(error: Exception, said: str) -> None:
    cases, order = made("plain", "a", "b", a=error)
    interleave(cases, rounds=2, warmup=0)
    plain, a, b = cases
    assert (a.failed, a.runs, order.count("a")) == (said, [], 1)
    assert len(b.pairs) == 2 and b.over(a, "ms") == [] == a.over(plain, "ms")
    cases, _ = made("plain", "a", plain=error)
    interleave(cases, rounds=2, warmup=0)
    assert cases[0].failed == said and len(cases[1].runs) == 2 and not cases[1].pairs
    cases, _ = made("plain", "a", a=ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):  # other errors are errors
        interleave(cases, rounds=1, warmup=0)


def test_runs_are_joined_by_round() -> None:
    one, other = Case(), Case()
    one.runs = [(turn, {"ms": ms}) for turn, ms in ((0, 1.0), (1, 5.0), (2, 2.0))]
    other.runs = [(0, {"ms": 2.0}), (2, {"ms": 8.0})]
    assert one.over(other, "ms") == [0.5, 0.25]


def test_quiet_puts_back_threads_gradients_and_garbage_collection() -> None:
    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="stop"), quiet(threads + 1):
        assert torch.get_num_threads() == threads + 1
        assert not gc.isenabled() and not torch.is_grad_enabled()
        raise RuntimeError("stop")
    assert (torch.get_num_threads(), gc.isenabled(), torch.is_grad_enabled()) == (threads, True, True)
    assert gc.get_freeze_count() == 0
    assert timed(lambda: 7)[0] == 7 and timed(lambda: 7)[1] >= 0


def test_a_spread_is_torchs_quantiles() -> None:
    values = torch.rand(11, dtype=torch.float64).tolist()
    found = spread(values)
    assert found is not None and found["all"] == values and found["median"] == sorted(values)[5]
    for percent in (5, 20, 80, 95):
        naive = float(torch.tensor(values, dtype=torch.float64).quantile(percent / 100))
        assert math.isclose(found[f"p{percent}"], naive)
    assert spread([1.0]) is None


@dataclass(frozen=True, kw_only=True)
class Own(Settings):
    """Settings of every type."""

    policies: Annotated[tuple[str, ...], "names"] = ("a", "b")
    keep_ratio: Annotated[float, "20 % by default"] = 0.2
    num_tokens: Annotated[int, "tokens"] = 7
    memory: Annotated[bool, "whether"] = True


def measure(settings: Own) -> dict[str, Any]:
    """Measure nothing."""
    if settings.num_tokens == 13:
        raise RuntimeError("unlucky")
    return {"rows": [{"policy": name, "ms": spread([1.0, 2.0])} for name in settings.policies]}


def table(record: dict[str, Any], settings: Own) -> list[str]:
    return [*heading(record, "nothing", "about it"), *grid((Column("policy", "policy"),), record["rows"])]


OWN = Benchmark(
    *("somewhere", "own", Own, measure, table, lambda settings: settings.num_tokens),
    shapes={"small": {}, "large": {"num_tokens": 70, "keep_ratio": 0.5}},
)


def test_settings_are_options_and_the_record_is_written_beside_its_table(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs" / "own.json"
    typed = "--what own --shape large --policies x y,z=1 --no-memory --keep-ratio 1 --output"
    assert main([OWN], [*typed.split(), str(output)]) == 0
    record, text = json.loads(output.read_text()), output.with_suffix(".txt").read_text()
    assert record["setting"] == {
        **{"threads": 2, "dtype": "float32", "device": "cpu", "seed": 0, "policies": ["x", "y,z=1"]},
        **{"keep_ratio": 1.0, "num_tokens": 70, "memory": False},
    }
    assert capsys.readouterr().out.startswith(text) and OWN.text(record) == text
    assert record["rows"][0]["ms"]["all"] == [1.0, 2.0] and record["what"] == "own"
    for part in ("torch 2.", "commit ", "cores, 2 threads; load ", "python -m somewhere --what own --shape"):
        assert part in text
    with pytest.raises(SystemExit):
        main([OWN], ["--what", "own", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Measure nothing." in said and "20 % by default; default 0.2" in said and "--watch" not in said


def test_a_process_of_its_own_is_given_the_whole_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(module: str, arguments: list[str]) -> list[str]:
        assert module == "somewhere" and main([OWN], arguments) == 0
        return ["noise", *capsys.readouterr().out.splitlines()]

    monkeypatch.setattr(benchmark, "in_a_process", run)
    assert OWN.watched([Own(num_tokens=3), Own(num_tokens=4, policies=("x",))]) == [3, 4]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--what owm", "error: unknown benchmark 'owm': did you mean 'own'"),
        ("--what own --shape smal", "unknown shape 'smal': did you mean 'small'"),
        ("--what own --num-tokens 13", "error: unlucky"),
        (
            "--what own --num-tokens 0 --seed -1 --keep-ratio 2 --dtype int8 --device tpu",
            "seed is a whole number of at least 0, got -1; num_tokens is a whole number of at least 1, got "
            "0; keep_ratio is kept / seen, above 0 and at most 1, got 2.0; dtype is one of float32, "
            "bfloat16, float16, got 'int8'; device is cpu or cuda, got 'tpu'.",
        ),
        ("--what own --device cuda", "device 'cuda' is not there: torch sees no CUDA device; take cpu"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    typed: str,
    message: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main([OWN], typed.split()) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_table_is_as_wide_as_its_cells_and_says_what_failed() -> None:
    columns = (
        Column("policy", "policy"),
        Column("ms", "ms", ".1f", wide=True),
        Column("MiB", "bytes.held", ".2f", 2**20),
    )
    rows = [
        {"policy": "a", "ms": {"median": 2.0, "p20": 1.0, "p80": 3.0}, "bytes": {"held": 3 * 2**19}},
        {"policy": "longer", "ms": None, "bytes": None},
        {"policy": "b", "failed": "out of memory"},
    ]
    assert grid(columns, rows) == [
        "policy             ms  MiB",
        "a      2.0 (1.0..3.0) 1.50",
        "longer              -    -",
        "b      out of memory",
    ]
