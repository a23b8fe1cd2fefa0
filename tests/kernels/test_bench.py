"""The benchmark's words and numbers, the check before it, and the steps of `make gpu`."""

import re
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch

from retain.kernels import backend, bench, gpu
from retain.kernels.bench import COPY, main, milliseconds, verdict
from retain.kernels.build import OPS
from retain.kernels.measure import Claim, check

CPU = torch.device("cpu")


def cases_of(op, factor=2.0, wrong_at=()):
    """The `cases` of an op that doubles its input, or should."""

    def run(case, kwargs):
        path = backend.path_for(op, kwargs["x"])
        right = path == "reference" and backend.forced() is not None
        return kwargs["x"] * (2.0 if right else 3.0 if case in wrong_at else factor)

    return SimpleNamespace(
        CASES={"one": 1, "odd": 7},
        SPEED={"cpu": {"short": 1000, "long": 3000}, "cuda": {}},
        CLAIMS=[Claim("short", "sum", 1e6), Claim("long", COPY, 1e6)],
        ROUNDING=(1, None),
        GRAPHED=False,
        inputs=lambda case, dtype, device, seed=0: {"x": torch.arange(case, device=device).to(dtype)},
        run=run,
        least_bytes=lambda case, dtype: 8.0 * case,
        rivals=lambda case, kwargs: {"sum": lambda: kwargs["x"] + kwargs["x"]},
    )


@pytest.fixture
def ops(monkeypatch):
    """Adds ops by name; copies and rounds are small."""

    def add(name, **settings):
        cases = cases_of(name, **settings)
        monkeypatch.setitem(sys.modules, f"retain.kernels.{name}", SimpleNamespace(cases=cases))
        monkeypatch.setitem(sys.modules, f"retain.kernels.{name}.cases", cases)
        monkeypatch.setattr(bench, "OPS", (name,))

    monkeypatch.setattr(bench, "COPY_BYTES", {"cpu": 4096})
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(backend, "_said", {})
    return add


def test_a_report_says_what_is_fast_and_what_is_claimed(ops, capsys):
    ops("doubling")
    assert main(["--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "## doubling" in text and "reference the tensors are not on CUDA" in text and ", commit " in text
    assert "### doubling, short, 7 rounds" in text
    assert re.search(r"- held: doubling, short: [\d.]+ \([\d.]+ \.\. [\d.]+\) x sum, at most 1e\+06", text)
    assert re.search(r"- \*\*NOT held\*\*: doubling, long: .* of the copy's bandwidth, at least 1e\+06", text)
    rows = [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ")]
    assert rows == 2 * ["what", "---", "doubling", "sum", COPY]


def test_a_wrong_op_gets_no_speed(ops, capsys):
    ops("tripling", wrong_at=(3000,))
    with pytest.raises(
        ValueError, match=r"wrong on long, so that no speed is shown: result 0: error 3\.00e\+03"
    ):
        main(["--device", "cpu"])
    assert "| ms |" not in capsys.readouterr().out


@pytest.mark.parametrize("held", [True, False])
def test_ratios_and_shares_are_taken_within_rounds(held):
    ms = {"op": [1.0, 2.0, 4.0], "rival": [2.0, 2.0, 2.0], COPY: [1.0, 1.0, 4.0]}
    for rival, bound, text in (
        ("rival", 1.0 if held else 0.9, "1.000 (0.700 .. 1.600) x rival, at most"),
        (COPY, 0.5 if held else 0.51, "0.500 (0.350 .. 0.500) of the copy's bandwidth, at least"),
    ):  # shares are 0.5, 0.25 and 0.5
        line = verdict(Claim("c", rival, bound), "op", ms, 5e8, 1e9)
        assert line == f"{'held' if held else '**NOT held**'}: op, c: {text} {bound:g}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda x: x, None),
        (lambda x: x + 1e-3 * (x == 3), "error 1.00e-03"),
        (lambda x: x.masked_fill(x == 2, float("nan")), "error inf"),
        (lambda x: x.masked_fill(x == float("inf"), 0.0), "error inf"),
    ],
)
def test_a_check_sees_what_is_wrong(change, problem):
    x = torch.tensor([1.0, 2.0, 3.0, float("inf")])
    cases = SimpleNamespace(ROUNDING=(1, None), inputs=lambda *given: {"x": x})
    cases.run = lambda case, kwargs: [kwargs["x"] if backend.forced() else change(kwargs["x"]), None]
    found = check(cases, None, torch.float32, CPU)
    assert found is None if problem is None else problem in found


@pytest.mark.gpu
def test_on_cuda_time_is_the_devices():
    big, flush = torch.ones(4096, 4096, device="cuda"), torch.empty(2**30, dtype=torch.int8, device="cuda")
    milliseconds(lambda: big @ big, flush)
    short, long = (milliseconds(lambda n=n: [big @ big for _ in range(n)], flush) for n in (1, 20))
    replayed = milliseconds(bench.graphed(lambda: [big @ big for _ in range(20)]), flush)
    assert 5 * short < min(long, replayed)


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Steps of a second each on a machine that says it has a device."""
    made = {
        "good": (60, f"-c \"print('held: it'); open('{tmp_path}/ran', 'a').write('x')\""),
        "bad": (60, "-c \"print('1 failed'); raise SystemExit(3)\""),
        "endless": (1, '-c "import time; time.sleep(60)"'),
    }
    monkeypatch.setattr(gpu, "steps", lambda out: made)
    monkeypatch.setattr(gpu, "LOOK", "print('a device')")
    return made


def test_a_failure_stops_no_other_and_the_same_command_goes_on(steps, tmp_path, capsys):
    out = tmp_path / "out"
    assert gpu.main(["--out", str(out)]) == 1
    (out / "speed-32k.json").write_text(
        '{"rows": [{"policy": "plain"}, {"policy": "merge", "ttft_over_plain": 1.2}]}'
    )
    summary = (out / "summary.md").read_text()
    rows = {line.split(" | ")[0][2:]: line for line in summary.splitlines() if line.startswith("| ")}
    assert "passed (" in rows["good"] and rows["good"].endswith("| held: it |") and "- held: it" in summary
    assert "failed, exit status 3" in rows["bad"] and "ended after 1 s" in rows["endless"]
    assert "a device" in summary and "bad: failed" in capsys.readouterr().out
    steps["bad"] = steps["endless"] = (60, '-c "print(1)"')
    assert gpu.main(["--out", str(out)]) == 0
    assert (tmp_path / "ran").read_text() == "x"  # not again
    assert "- **NOT held**: prefill, merge: 1.200, at most 1.15" in (out / "summary.md").read_text()
    assert gpu.main(["--out", str(tmp_path / "late"), "--minutes", "0"]) == 1
    assert not (tmp_path / "late/good.log").exists()


def test_without_a_device_nothing_is_tried(steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "LOOK", "print('no CUDA device'); raise SystemExit(1)")
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().out and not (tmp_path / "summary.md").exists()


def test_wheels_travel_along(steps, tmp_path):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels/lacking-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking.py", "ANSWER = 42\n")
    steps["good"] = (60, '-c "import lacking; assert lacking.ANSWER == 42"')
    assert gpu.main(["--out", str(tmp_path), "--only", "go*", "--wheels", str(tmp_path / "wheels")]) == 0


def test_the_plan_names_every_op_and_commands_that_there_are(tmp_path):
    plan = gpu.steps(tmp_path)
    assert set(OPS) == {path.parent.name for path in (gpu.ROOT / "kernels").glob("*/cases.py")}
    assert {f"bench-{op}" for op in OPS} | {f"tests-{op}" for op in OPS} <= {
        *plan
    } and "tests-kernels" in plan
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
    from retain.eval import speed

    for name in ("graphs-32k", "speed-32k"):
        given = vars(speed.parser().parse_args(plan[name][1].split()[2:]))
        assert given["device"] == "cuda" and given["shape"].startswith("32,4096,")


def test_a_call_on_a_gpu_is_timed_by_events_behind_a_flush(monkeypatch):
    seen = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        record = synchronize = lambda self: seen.append("event")
        elapsed_time = staticmethod(lambda after: 7.0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    flush = SimpleNamespace(is_cuda=True, zero_=lambda: seen.append("flush"))
    assert milliseconds(lambda: seen.append("call"), flush) == 7.0
    assert seen == ["flush", "event", "call", "event", "event"]
