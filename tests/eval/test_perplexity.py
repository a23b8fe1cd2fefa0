"""Perplexity against the full cache: naive numbers, a control that is 0, intervals that pair, bad input."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch

from retain.eval.config import FULL
from retain.eval.diagnose.documents import cut
from retain.eval.diagnose.perplexity import Reading, main, read_pieces, summarise, table
from retain.presets import load_policy
from retain.reference import load_model
from retain.reference.corpus import stream

CONTEXT, SCORED = 96, 12


@pytest.fixture(scope="module")
def model():
    return load_model(0)


@pytest.fixture(scope="module")
def pieces():
    ids = stream("eval")[:2000].tolist()
    return cut(ids, [1], context_tokens=CONTEXT, behind=1 + SCORED, documents=3)


@pytest.fixture(scope="module")
def readings(model, pieces):
    policies = {name: load_policy(name) for name in ("snapkv", "random")}
    return list(read_pieces(model, pieces, policies, (0.5, 1.0), context_tokens=CONTEXT))


def test_pieces_are_spread_and_do_not_overlap(pieces):
    ids = stream("eval")[:2000].tolist()
    assert [len(piece) for piece in pieces] == [CONTEXT + 1 + SCORED] * 3
    assert [piece[0] for piece in pieces] == [1, 1, 1]
    assert [list(piece[1:]) for piece in pieces] == [
        ids[start : start + CONTEXT + SCORED] for start in (0, 666, 1332)
    ]


def test_the_full_cache_is_the_model(model, pieces, readings):
    """Loss by three lines of torch, and no divergence of what holds everything."""
    for one in readings:
        piece = torch.tensor([pieces[one.document]])
        with torch.inference_mode():
            logits = model(piece).logits[0].double().log_softmax(-1)
        losses = [-float(logits[place - 1, piece[0, place]]) for place in range(CONTEXT + 1, piece.shape[1])]
        assert one.loss_full == pytest.approx(sum(losses) / SCORED, rel=1e-4)
        assert one.tokens == SCORED
        if one.keep_ratio == 1.0:
            assert one.kept_entries == one.seen_entries and one.kl < 1e-8 and one.agreement == 1
            assert one.loss == pytest.approx(one.loss_full, abs=1e-4)
        else:
            assert one.kept_entries < 0.6 * one.seen_entries and one.kl > 1e-6
    cells = [(FULL, 1.0), *itertools.product(("snapkv", "random"), (0.5, 1.0))]
    assert [(one.policy, one.keep_ratio) for one in readings] == cells * 3


def test_rows_are_means_over_pieces(readings):
    rows = summarise(readings)
    assert len(rows) == 5
    for row in rows:
        own = [r for r in readings if (r.policy, r.keep_ratio) == (row["policy"], row["keep_ratio"])]
        assert row["perplexity"] == pytest.approx(math.exp(np.mean([r.loss for r in own])))
        ratio = row["perplexity_ratio"]
        assert ratio["estimate"] == pytest.approx(row["perplexity"] / row["perplexity_full"])
        assert ratio["low"] <= ratio["estimate"] <= ratio["high"]
        assert row["kl"]["estimate"] == pytest.approx(np.mean([r.kl for r in own]))
        assert (row["tokens"], row["documents"]) == (3 * SCORED, 3)
    assert len(table(rows).splitlines()) == 6


def test_an_interval_is_paired():
    """A policy that is worse by the same everywhere has no spread, however unlike the pieces are."""
    own = [Reading(n, "it", 0.5, n + 0.1, float(n), 0.2, 0.5, 1, 2, 4) for n in range(6)]
    (row,) = summarise(own)
    ratio = row["perplexity_ratio"]
    assert ratio["low"] == pytest.approx(math.exp(0.1)) == pytest.approx(ratio["high"])
    with pytest.raises(ValueError, match="read on different pieces"):
        summarise([*own, Reading(0, "other", 0.5, 1.0, 1.0, 0.0, 1.0, 1, 2, 4)])


def test_command(tmp_path, capsys):
    text, out = tmp_path / "own.txt", tmp_path / "ppl.json"
    text.write_text("def walk(top):\n    for name in listing(top):\n        yield name\n" * 30)
    typed = ["--text", str(text), "--policies", "snapkv,protection.recent=4", "--keep-ratio", "0.5"]
    typed += ["--context-tokens", "64", "--scored-tokens", "8", "--documents", "2", "--out", str(out)]
    assert main(typed) == 0
    record = json.loads(out.read_text())
    assert record["control_kl"] < 1e-8 and record["made"]["text"] == "own.txt"
    assert [row["policy"] for row in record["rows"]] == ["snapkv,protection.recent=4"]
    assert record["command"].startswith("python -m retain.eval.diagnose.perplexity --text")
    assert "snapkv,protection.recent=4" in capsys.readouterr().out
    before = out.read_text()
    assert main(typed) == 2 and out.read_text() == before
    assert "nothing is overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--policies", "snapkw"], "unknown policy 'snapkw': did you mean 'snapkv'"),
        (["--keep-ratio", "1.5"], r"above 0 and at most 1, got \[1.5\]"),
        (["--text", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--scored-tokens", "0"], "scored_tokens is 1 or more, got 0"),
        (["--policies", "gate"], "gate takes a gate's score and there is none"),
        (["--policies", "full"], "'full' keeps everything, and the full cache is always measured"),
        (
            ["--policies", "kivi"],
            "'kivi' has a precision, .* equal numbers of entries: take eval/compare.py",
        ),
    ],
    ids=["policy", "ratio", "text", "scored", "gates", "full", "bits"],
)
def test_wrong_input(capsys, changed, said):
    given = {"--policies": "snapkv", "--keep-ratio": "0.5"} | {changed[0]: changed[1]}
    assert main([word for pair in given.items() for word in pair]) == 2
    assert re.search(said, capsys.readouterr().err)
