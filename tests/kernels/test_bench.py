import gc
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from retain.kernels import backend, bench, measure, provenance
from retain.kernels.bench import COPY, MATMUL, Measured, main, table, verdict
from retain.kernels.measure import Claim, Cost, Spread, extra_bytes, wrong

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    size: int


def cases_of(op, factor=2.0, rival=torch.add, wrong_at=(), broken=False):
    """The `cases` of an op that doubles its input, or should."""
    calls = []

    def run(case, kwargs):
        calls.append(case)
        backend.path_for(op, kwargs["x"])
        if broken and len(calls) > 2:
            raise RuntimeError("the device | fell over\nand more")
        return kwargs["x"] * (3.0 if case.size in wrong_at else factor)

    def inputs(case, dtype, device, seed=0):
        return {"x": torch.arange(case.size, device=device).to(dtype)}

    def check(case, dtype, device, seed=0):
        given = inputs(case, dtype, device, seed)
        return wrong(run(case, given), 2 * given["x"].double(), what="double")

    return SimpleNamespace(
        CASES={"one": Case(1), "odd": Case(7)},
        SPEED={"cpu": {"short": Case(1000), "long": Case(3000)}, "cuda": {}},
        CLAIMS={
            "cpu": [
                Claim("fast", "sum with itself", at_most=1e6),
                Claim("impossible", COPY, at_least=1e6, case="long"),
                Claim("lean", extra_mb_at_most=0.001),
                Claim("of another", "flash", at_most=1.0, case="short"),
            ],
            "cuda": [Claim("never looked at", MATMUL, at_least=1.0)],
        },
        inputs=inputs,
        run=run,
        check=check,
        cost=lambda case, dtype: Cost(2.0 * case.size, 8.0 * case.size),
        rivals=lambda case, kwargs: {"sum with itself": lambda: rival(kwargs["x"], kwargs["x"])},
        calls=calls,
    )


@pytest.fixture
def ops(monkeypatch):
    """Ops by name, to be filled in; ceilings and rounds are small."""
    made = {}

    def add(name, **settings):
        made[name] = cases_of(name, **settings)
        monkeypatch.setitem(sys.modules, f"retain.kernels.{name}", SimpleNamespace(cases=made[name]))
        monkeypatch.setitem(sys.modules, f"retain.kernels.{name}.cases", made[name])
        monkeypatch.setattr(bench, "OPS", tuple(made))
        return made[name]

    monkeypatch.setattr(bench, "COPY_BYTES", {"cpu": 4096})
    monkeypatch.setattr(bench, "MATMUL_SIDE", {"cpu": 8})
    monkeypatch.setattr(bench, "SECONDS", 0.0)
    monkeypatch.setattr(backend, "_said", {})
    return add


def test_a_report_says_what_is_fast_and_what_is_claimed(ops, capsys, tmp_path):
    ops("doubling")
    out = tmp_path / "benchmarks" / "cpu.md"
    arguments = ["--device", "cpu", "--threads", "1", "--out", str(out)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert out.read_text() == text and not list(tmp_path.rglob("*.new"))
    for part in ("date: 20", "device: cpu", "cores, 1 threads", "load before: ", "load after: ", "torch 2."):
        assert part in text
    assert f"- command: `python -m retain.kernels.bench --device cpu --threads 1 --out {out}`" in text
    assert "- path: doubling runs as reference: the tensors are not on CUDA" in text
    assert "right on 2 small cases and on 2 shapes to be timed" in text
    assert "### doubling, short, float32\n\n`Case(size=1000)`\n\n7 rounds; at least 0.000 GFLOP" in text
    assert text.count("- held: fast: ") == 2 and text.count("held: lean") == 2
    assert re.search(
        r"- \*\*NOT held\*\*: impossible: [\d.]+ \([\d.]+ \.\. [\d.]+\) of copy, at least 1e\+06", text
    )
    assert text.count("impossible") == 1, "it is about one shape"
    assert "**not measured**: of another: flash: there is no such rival on this device" in text
    assert "never looked at" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0][2:] for line in rows if "---" not in line] == 2 * [
        *("what", "doubling", "sum with itself", COPY, MATMUL)
    ]
    assert {line.count("|") for line in rows} == {11}


def test_a_wrong_op_gets_no_speed_and_the_others_do(ops, capsys, monkeypatch):
    wrong_one = ops("tripling", factor=3.0)
    ops("doubling")
    assert main(["--device", "cpu"]) == 1
    text = capsys.readouterr().out
    bad, good = text.split("## doubling", 1)
    assert "- wrong: odd, float32: double: error 6.00e+00, 2.40e-05 allowed" in bad
    assert "- wrong: long, float32: double" in bad and "**WRONG** in 3 cases: no speed is shown." in bad
    assert "| ms |" not in bad and "rounds;" not in bad and "held:" not in bad
    assert len(wrong_one.calls) == 4, "each case was looked at once, and none was timed"
    assert good.count("| ms |") == 2


def made_up(**more):
    settings = {
        "ms": {
            "op": [1.0, 2.0, 4.0],
            "rival": [2.0, 2.0, 2.0],
            COPY: [1.0, 1.0, 4.0],
            MATMUL: [3.0, 2.0, 1.0],
        },
        "extra": {"op": 3_000_000, "rival": 0},
        "ceilings": {COPY: 1e9, MATMUL: 1e12},
    }
    return Measured("op", Cost(flops=5e11, bytes=5e8), **{**settings, **more})


def test_ratios_and_shares_are_taken_within_rounds():
    found = made_up()
    assert found.over("rival") == Spread(1.0, pytest.approx(0.7), pytest.approx(1.6))
    assert found.share(COPY).median == 0.5  # of 0.5, 0.25 and 0.5
    assert found.share(MATMUL).median == 0.5  # of 1.5, 0.5 and 0.125
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(found)]
    assert cells[2] == ["op", "2.000", "1.400", "3.200", "", "250.0", "50.0%", "250.000", "50.0%", "3.0"]
    assert cells[3][4:] == ["1.000 (0.700 .. 1.600)", "", "", "", "", "0.0"]
    assert cells[4][:1] + cells[4][5:] == [COPY, "1000.0", "", "", "", ""]
    assert cells[5][:1] + cells[5][5:] == [MATMUL, "", "", "500.000", "", ""]
    bandwidth_alone = Measured("op", Cost(0.0, 5e8), found.ms, found.extra, {}, found.ceilings)
    assert table(bandwidth_alone)[2].endswith("| 250.0 | 50.0% | | | 3.0 |")


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (Claim("c", "rival", at_most=1.0), r"^held: c: 1\.000 \(0\.700 \.\. 1\.600\) x rival, at most 1$"),
        (Claim("c", COPY, at_least=0.5), r"^held: c: 0\.500 .* of copy, at least 0\.5$"),
        (Claim("c", MATMUL, at_least=0.51), r"^\*\*NOT held\*\*: c: 0\.500 .* of matmul"),
        (Claim("c", extra_mb_at_most=3), r"^held: c: 3\.0 MB beyond inputs and outputs, at most 3$"),
        (
            Claim("c", "rival", at_most=1.0, extra_mb_at_most=1),
            r"^\*\*NOT held\*\*: c: 1\.0.* rival.*; 3\.0 MB",
        ),
        (Claim("c", "gone", at_most=1.0), r"^\*\*not measured\*\*: c: gone: OutOfMemoryError"),
        (Claim("c", "rival", at_most=1.0, case="shape"), r"^held"),
    ],
)
def test_a_claim_is_held_or_not(claim, said):
    assert re.search(said, verdict(claim, "shape", made_up(not_run={"gone": "OutOfMemoryError"})))


def test_memory_is_what_was_held_beyond_inputs_and_outputs():
    big = torch.ones(1000, 1000)

    def run():
        product = big @ big
        doubled = product * 2
        del product
        return doubled.sum(0), big[:10]

    gc.collect()
    assert extra_bytes(run, CPU) == pytest.approx(8_000_000, rel=0.01)
    assert extra_bytes(lambda: big * 2, CPU) < 100  # the number 2
    assert extra_bytes(lambda: big.neg_(), CPU) == 0
    # Temporaries inside an operation count too: a copy, and the position of each of its entries.
    assert extra_bytes(lambda: big.kthvalue(5).values, CPU) > 12_000_000


def test_what_is_not_finite_must_be_equal_and_whole_numbers_exact():
    inf = float("inf")
    reference = torch.tensor([1.0, -inf, inf], dtype=torch.float64)
    assert wrong(reference.float(), reference) is None
    assert "error inf" in wrong(torch.tensor([1.0, 0.0, inf]), reference)
    assert "error inf" in wrong(torch.tensor([float("nan"), -inf, inf]), reference)
    whole = torch.arange(4)
    assert wrong(whole, whole) is None and wrong(whole.bool(), whole.bool()) is None
    assert wrong(whole + (whole == 2), whole, what="positions") == "positions: 1 of 4 differ"
    assert wrong(whole, whole[:3], what="positions") == "positions has shape (4,), wanted (3,)"
    assert wrong(torch.zeros(0), torch.zeros(0, dtype=torch.float64)) is None


def test_a_tree_that_is_not_clean_is_no_evidence(monkeypatch):
    for changes, said in (("", "abc, clean"), (" M file", "abc, tree NOT clean: scratch, no evidence")):
        answers = {"rev-parse": "abc", "status": changes}
        monkeypatch.setattr(provenance, "output_of", lambda *command, answers=answers: answers[command[3]])
        assert measure.provenance(CPU, 1)["commit"] == said
    monkeypatch.setattr(provenance, "output_of", lambda *command: None)
    assert measure.provenance(CPU, 1)["commit"] == "none, tree NOT clean: scratch, no evidence"


@pytest.mark.gpu
def test_on_cuda_time_and_memory_are_the_devices():
    device = torch.device("cuda")
    big = torch.ones(4096, 4096, device=device)
    clock = measure.Clock(device)
    clock.milliseconds(lambda: big @ big)
    short, long = (clock.milliseconds(lambda n=n: [big @ big for _ in range(n)]) for n in (1, 20))
    assert 5 * short < long
    assert extra_bytes(lambda: (big * 2).sum(), device) == pytest.approx(big.nbytes, rel=0.01)


@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--threads", "0"], ["--op", "atention_stats"]])
def test_errors_come_before_work(arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "benchmark", None)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
