"""The command that times inference: its record, what it refuses, and what it measures."""

import json
from dataclasses import replace

import pytest
import torch

from retain.eval import speed
from retain.eval.speed import Setting, lives_of, main, random_model
from retain.eval.text_table import Column, text_table
from retain.hf.intercept.attach import attach

SHAPE = {"model": "random", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
TINY = {**SHAPE, "tokens": 96, "steps": 3, "rounds": 2, "warmup": 0, "threads": 1, "gates": "random"}
ENTRY = 2 * 2 * 8 * 4  # layers x (key and value) x width x float32, of a KV head


def typed(**more):
    settings = {**TINY, "policies": "snapkv,merge", "keep_ratios": "0.5,0.75", "batches": "1,2", **more}
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.always
def test_a_record_has_every_policy_beside_the_full_caches(tmp_path, capsys):
    assert main([*typed(), "--output", str(tmp_path / "speed.json")]) == 0
    record = json.loads((tmp_path / "speed.json").read_text())
    rows, names = record["rows"], ["dense", "snapkv", "merge"]
    sides = [(row["policy"], row["keep_ratio"]) for row in rows[:8]]
    assert sides == [("plain", 1.0), ("full", 1.0), *((name, r) for r in (0.5, 0.75) for name in names)]
    assert [row["batch"] for row in rows] == [1] * 8 + [2] * 8
    for row in rows:
        seen = row["batch"] * 2 * 96
        most = seen * row["keep_ratio"] * ENTRY
        # A merge pays its number with each entry out of the budget.
        assert most * 0.9 <= row["cache_bytes"]["held"] <= most
        assert row["held_of_full"] == row["cache_bytes"]["held"] / (seen * ENTRY)
        assert len(row["token_ms"]["all"]) == 2 and row["peak_bytes"] == {}
        if row["policy"] != "plain":
            assert row["ttft_over_plain"]["median"] > 0
        assert ("token_over_dense" in row) == (row["policy"] in ("snapkv", "merge"))
    shown = capsys.readouterr().out
    assert (tmp_path / "speed.txt").read_text() in shown and "python -m retain.eval.speed" in shown


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"keep_ratios": "0.5,2"}, "keep_ratios[1]: input should be less than or equal to 1"),
        ({"rounds": 1}, "rounds: input should be greater than or equal to 2, got 1"),
        ({"heads": 3}, "is no multiple of 2 x 3 heads"),
        ({"policies": "snapkv,recensy"}, "did you mean 'recency'"),
        ({"keep_ratios": "0.02"}, "policy 'snapkv' at 0.02: "),
        ({"gates": ""}, "policy 'merge' at 0.5: "),
        ({"model": "reference:0", "tokens": 10**6}, "more than the"),
        ({"device": "cuda"}, "device is 'cuda', and torch sees no GPU here"),
        ({"device": "foo"}, "device is 'foo', and must be 'cpu', 'cuda', 'cuda:1', or 'auto'"),
        ({"dtype": "flaot32"}, "dtype is 'flaot32' (did you mean 'float32'?)"),
    ],
)
def test_errors_come_before_anything_is_timed(more, said, tmp_path, capsys, monkeypatch):
    if "device" in more and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.setattr(speed, "row_of", lambda *_: pytest.fail("timed"))
    assert main([*typed(batches="1", **more), "--output", str(tmp_path / "speed.json")]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith("usage: retain speed ")


def test_a_cache_without_memory_is_said_and_the_others_go_on(monkeypatch):
    setting = Setting(**TINY, policies=("snapkv",), keep_ratios=(0.5,))
    model = random_model(setting)
    with attach(model):
        lives = lives_of(setting, model, None, 1)

        def fail():
            raise torch.OutOfMemoryError

        monkeypatch.setattr(lives[1], "live", fail)
        for _ in range(2):
            for life in lives:
                life.attempt(count=True)
    rows = [speed.row_of(life, lives, 1) for life in lives]
    assert [row["failed"] for row in rows] == ["", "out of memory", "", ""]
    assert "token_over_plain" in rows[3] and "token_over_full" not in rows[3]
    columns = (Column("policy", "policy"), Column("token", "token_ms", ".1f", wide=True))
    assert text_table(columns, rows)[2].split() == ["full", "-", "out", "of", "memory"]


def test_the_plain_caches_have_the_same_weights_in_a_model_that_is_not_attached():
    setting = replace(Setting(**TINY), policies=("snapkv",), keep_ratios=(0.5,))
    model = random_model(setting)
    with attach(model):
        plain, full, dense, _ = lives_of(setting, model, None, 1)
    assert plain.model is dense.model is not model and full.model is model
    pairs = zip(plain.model.parameters(), model.parameters(), strict=True)
    assert all(own is its for own, its in pairs)
    assert torch.equal(plain.ids_BT, full.ids_BT)
