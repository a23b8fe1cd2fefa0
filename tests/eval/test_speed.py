"""The command that times inference: its record, what it refuses, and what it measures."""

import json
import re
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from retain.eval import speed
from retain.eval.record import text_table
from retain.eval.speed import Subjects, compiled_lines, live, main, measure, parser

TINY = {"shape": "2,32,4,2,48", "tokens": 96, "steps": 3, "rounds": 2}
ENTRY = 2 * 2 * 8 * 4  # layers x (key and value) x width x float32, of a KV head


def typed(**more):
    settings = {**TINY, "policies": "snapkv,merge", "keep_ratio": "0.5", "batch": "2", **more}
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def subjects(**more):
    return Subjects(parser().parse_args(typed(**more)))


@pytest.mark.always
def test_a_record_has_every_policy_and_the_full_caches(tmp_path, capsys):
    assert main([*typed(), "--output", str(tmp_path / "speed.json")]) == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    rows = {row["policy"]: row for row in record["rows"]}
    assert [*rows] == ["plain", "dense", "full", "snapkv", "merge"]
    for name, row in rows.items():
        most = 2 * 2 * 96 * ENTRY * (1 if name in ("plain", "full") else 0.5) / 2**20
        # A merge pays its number with each entry out of the budget.
        assert most * 0.9 <= row["mib_held"] <= most and "mib_peak" not in row
        assert {other for other in ("plain", "full", "dense") if not row[f"token_over_{other}"]} <= {name}
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("policy") and len(shown) == 7
    assert record["command"].startswith("retain speed --shape 2,32,4,2,48 ")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"keep_ratio": "2"}, "keep_ratio"),
        ({"rounds": 0}, "batch, tokens, steps and rounds are 1 or more"),
        ({"shape": "2,32,3,1,48"}, "width a multiple of 2 x heads"),
        ({"policies": "snapkv,recensy"}, "did you mean 'recency'"),
        ({"keep_ratio": "0.02"}, "protect"),
        ({"gates": "nowhere"}, "nowhere"),
        ({"dtype": "flaot32"}, "dtype is 'flaot32' (did you mean 'float32'?)"),
    ],
)
def test_errors_come_before_anything_is_written(more, said, tmp_path, capsys):
    assert main([*typed(**more), "--output", str(tmp_path / "speed.json")]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_caches_take_turns_and_ratios_are_of_one_round(monkeypatch):
    times = iter(range(1, 99))
    monkeypatch.setattr(
        speed, "live", lambda *_, **__: {"ttft_ms": 2.0, "mib_held": 1.0, "token_ms": float(next(times))}
    )
    plain, dense, full, snapkv = measure(subjects(policies="snapkv"))
    # Behind a round that does not count: dense, full, snapkv, plain; then full, snapkv, plain, dense.
    assert [row["token_ms"] for row in (plain, dense, full, snapkv)] == [9.5, 8.5, 7.5, 8.5]
    assert snapkv["token_over_plain"] == pytest.approx((7 / 8 + 10 / 11) / 2)
    assert plain["token_over_plain"] is None and snapkv["ttft_over_plain"] == 1.0


def test_transformers_caches_have_the_same_weights_in_a_model_that_is_not_attached():
    made = subjects()
    pairs = zip(made.twin.parameters(), made.model.parameters(), strict=True)
    assert made.twin is not made.model and all(mine is its for mine, its in pairs)
    with torch.no_grad():
        found = live(made.twin, partial(DynamicCache, config=made.twin.config), made.ids_BT, 96, 24)
    assert found["mib_held"] == 2 * 2 * 24 * ENTRY / 2**20


def test_each_way_is_timed_and_each_aim_is_said_to_hold_or_not():
    made = subjects(batch=1, tokens=320, steps=2, keep_ratio=0.4)
    lines = compiled_lines(made, partial(torch.compile, backend="eager"))
    head, rows, aims = lines[0], lines[1:10], lines[10:]
    assert "ms" in head and len({re.split(r"  +", row)[0] for row in rows}) == 9
    assert len(aims) == 5 and all(
        re.match(r"(held|\*\*NOT held\*\*): .* at most 1\.[01]5", line) for line in aims
    )


def test_rows_stand_under_their_titles():
    table = text_table([{"policy": "snapkv", "keep": 0.5}, {"policy": "full", "keep": None}])
    assert table.splitlines() == ["policy keep", "snapkv  0.5", "full      -"]
