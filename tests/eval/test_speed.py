"""The command that times inference: its record, what it refuses, and what it measures."""

import json
import re
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from retain.eval import speed
from retain.eval.speed import Setting, Subjects, compiled_lines, live, main
from retain.eval.text_table import text_table
from retain.hf.intercept.attach import attach

TINY = {"shape": "2,32,4,2,48", "tokens": 96, "steps": 3, "rounds": 2}
ENTRY = 2 * 2 * 8 * 4  # layers x (key and value) x width x float32, of a KV head


def typed(**more):
    settings = {**TINY, "policies": "snapkv,merge", "keep_ratio": "0.5", "batch": "2", **more}
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.always
def test_a_record_has_every_policy_and_the_full_caches(tmp_path, capsys):
    assert main([*typed(), "--output", str(tmp_path / "speed.json")]) == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    assert [row["policy"] for row in record["rows"]] == ["plain", "full", "dense", "snapkv", "merge"]
    for row in record["rows"]:
        most = 2 * 2 * 96 * ENTRY * (1 if row["policy"] in ("plain", "full") else 0.5)
        # A merge pays its number with each entry out of the budget.
        assert most * 0.9 <= row["bytes_held"] <= most
        assert len(row["token_ms"]["all"]) == 2 and "peak_bytes" not in row
        compared = {name.removeprefix("token_over_") for name in row if name.startswith("token_over_")}
        assert compared == {"plain", "full", "dense"} - {row["policy"]}
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("policy") and len(shown) == 7
    assert record["command"].startswith("retain speed --shape 2,32,4,2,48 ")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"keep_ratio": "2"}, "keep_ratio: input should be less than or equal to 1"),
        ({"rounds": 1}, "rounds: input should be greater than or equal to 2, got 1"),
        ({"shape": "2,32,3,1,48"}, "width a multiple of 2 x heads"),
        ({"policies": "snapkv,recensy"}, "did you mean 'recency'"),
        ({"keep_ratio": "0.02"}, "policy 'snapkv': "),
        ({"gates": "nowhere"}, "nowhere"),
        ({"device": "cuda"}, "device is 'cuda', and torch sees 0 GPUs"),
        ({"dtype": "flaot32"}, "dtype is 'flaot32' (did you mean 'float32'?)"),
    ],
)
def test_errors_come_before_anything_is_written(more, said, tmp_path, capsys):
    if "device" in more and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main([*typed(**more), "--output", str(tmp_path / "speed.json")]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_cache_without_memory_is_said_and_the_others_go_on(monkeypatch):
    def live(model, empty, ids_BT, tokens, cut_to=None):
        if cut_to is not None:
            raise torch.OutOfMemoryError
        return {"ttft_ms": 2.0, "bytes_held": 2**20, "token_ms": float(next(times))}

    times = iter(range(1, 99))
    monkeypatch.setattr(speed, "live", live)
    rows = speed.measure(Setting(**TINY, policies="snapkv", keep_ratio=0.5))
    assert [row["policy"] for row in rows] == ["plain", "full", "dense (out of memory)", "snapkv"]
    assert "token_over_plain" in rows[3] and "token_over_dense" not in rows[3]
    # The order rotates: after a round that does not count full, snapkv, plain; then snapkv, plain, full.
    assert [row["token_ms"]["all"] for row in (rows[0], rows[1], rows[3])] == [[6, 8], [4, 9], [5, 7]]
    assert rows[3]["token_over_plain"]["all"] == [5 / 6, 7 / 8]
    assert speed.table(rows)[3].split() == ["dense", "(out", "of", "memory)", *["-"] * 8]


def test_transformers_caches_have_the_same_weights_in_a_model_that_is_not_attached():
    subjects = Subjects(Setting(**TINY))
    pairs = zip(subjects.twin.parameters(), subjects.model.parameters(), strict=True)
    assert subjects.twin is not subjects.model and all(mine is its for mine, its in pairs)
    with attach(subjects.model), torch.no_grad():
        found = live(
            subjects.twin, partial(DynamicCache, config=subjects.twin.config), subjects.ids_BT, 96, 24
        )
    assert found["bytes_held"] == 2 * 24 * ENTRY


def test_each_way_is_timed_and_each_aim_is_said_to_hold_or_not():
    more = {"tokens": 320, "steps": 2, "policies": "snapkv,merge", "keep_ratio": 0.4}
    lines = compiled_lines(Setting(**{**TINY, **more}), partial(torch.compile, backend="eager"))
    head, rows, aims = lines[0], lines[1:10], lines[10:]
    assert "ms" in head and len({re.split(r"  +", row)[0] for row in rows}) == 9
    assert len(aims) == 5 and all(
        re.match(r"(held|\*\*NOT held\*\*): .* at most 1\.[01]5", line) for line in aims
    )


def test_rows_stand_under_their_titles():
    table = text_table(["policy", "keep"], [["snapkv", "0.5"], ["full", "1.25"]])
    assert table == ["policy keep", "snapkv  0.5", "full   1.25"]
