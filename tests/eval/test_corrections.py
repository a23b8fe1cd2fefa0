"""The simulation of corrections answers as caches that correct, where there are such."""

import pytest
import torch

from retain.eval.run.evaluated_model import Unit, load_evaluated
from retain.eval.run.runner import run_unit
from retain.eval.studies import corrections
from retain.eval.studies.corrections import Cut, Rows, measure, merge, none, report
from tests.close import assert_close
from tests.eval.stub import MORE_STUB, stub_config


@pytest.mark.parametrize("regime", ["context_only", "query_aware"])
def test_simulated_answers_are_those_of_caches(stub_gates, monkeypatch, regime):
    own = {"none": none, "merged": merge(0.2, targets="but the last 8")}
    monkeypatch.setattr(corrections, "CORRECTIONS", own)
    made = {"regimes": (regime,), "keep_ratios": (0.6,), "tasks": ("ragged",), "items_per_task": 3}
    config = stub_config(
        stub_gates,
        policies=("snapkv", "merged"),
        variants={"merged": ("snapkv", "correction={threshold: 0.2, recent: 8}")},
        **made,
    )
    evaluated = load_evaluated(config, MORE_STUB, 0)
    rows = run_unit(config, MORE_STUB, evaluated, Unit(0, "ragged", 0, 3)).rows
    names = {"snapkv": "none", "merged": "merged"}
    wanted = {(names[row.policy], row.item): row.tokens for row in rows if row.policy in names}
    alone = stub_config(stub_gates, policies=("snapkv",), **made)
    got = {(row["correction"], row["item"]): row["tokens"] for row in measure(alone, MORE_STUB, [*own])}
    assert got == wanted and len(got) == 6
    assert any(got["none", item] != got["merged", item] for item in range(3)), "nothing was corrected"


def cut_of(seed=0, R=3, T=30, D=4):
    draw = torch.Generator().manual_seed(seed)
    keys, plain, values = (torch.randn(R, T, D, generator=draw) for _ in range(3))
    exists = torch.ones(R, T, dtype=torch.bool)
    ids = torch.randint(0, 9, (R, T), generator=draw)
    rows = Rows(keys, plain, values, exists, ids, torch.rand(R, T, generator=draw))
    keep = torch.rand(R, T, generator=draw) < 0.4
    return Cut(rows, keep, keep, torch.rand(R, T, generator=draw))


def test_a_count_is_as_if_the_merged_had_come_as_often():
    cut = cut_of()
    _, _, bias = merge(-1.0, count=True)(cut)
    assert_close(bias.exp().masked_fill(~cut.keep_RT, 0.0).sum(-1), cut.rows.exists_RT.sum(-1).float())


def test_a_report_pairs_items():
    made = [
        {"regime": "r", "keep_ratio": 0.1, "selection": "s", "correction": name, "task": "t", "seed": 0}
        | {"item": item, "exact": float(name == "more" or item % 2)}
        for name in ("none", "more")
        for item in range(20)
    ]
    (line,) = report(made, [("more", "none")]).splitlines()
    assert "| 100.0 | 50.0 | +50.0 [" in line and line.endswith("| better |")


def test_a_report_reads_comparisons():
    made = [
        {
            "regime": "r",
            "budget": budget,
            "policy": name,
            "task": "t",
            "family": "seen",
            "seed": 0,
            "item": item,
        }
        | {"exact": float(item % 2 or (name, budget) == ("a", 0.02))}
        for item in range(40)
        for name, budget in (("a", 0.02), ("b", 0.05))
    ]
    lines = report(made, [("a 0.02", "b 0.05")]).splitlines()
    assert [line.split(" | ")[1:4] for line in lines] == [
        [own, "a 0.02", "b 0.05"] for own in ("all", "seen")
    ]
    assert all("| 100.0 | 50.0 | +50.0 [" in line for line in lines)
