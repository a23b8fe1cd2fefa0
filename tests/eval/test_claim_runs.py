"""Several runs read as one, and what stands beside the claims: other lines with the same gates, and presets
that nobody measured."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from retain.eval.claims.fused import WANTED_AT, WANTED_IN, check_better, check_not_worse, main, parts_of
from retain.eval.claims.runs import join
from retain.eval.stats.summary import Cell, gather
from tests.eval.made_claims import (
    FAMILY,
    OPTIONS,
    PARTS,
    RATES,
    SCORES,
    SEEDS,
    Rates,
    changed,
    check_of,
    complete,
    line_of,
    make_manifest,
    make_rows,
    write_run,
)

LEARNED = {"learned": True, "allocation": {"head_classes": None}, "scope": "model"}


def with_gate_model() -> tuple[Rates, dict[str, Any]]:
    """A run in which the gate under the fused policy's budget is better than it, with its manifest."""
    rates = {**complete(RATES)}
    for cell in [cell for cell in rates if cell[1] == "fused"]:
        rates[cell[0], "gate_model", cell[2]] = tuple(min(1.0, own + 0.075) for own in rates[cell])
        rates[cell[0], "untrained", cell[2]] = (0.1, 0.1, 0.1)
    manifest = make_manifest()
    manifest["identity"]["policies"] = dict.fromkeys(
        ("fused", "gate", "gate_model", "untrained", "other_gates"), LEARNED
    )
    manifest["identity"]["gates_of_policies"] = {
        "untrained": {str(seed): {"sha256": f"{seed}" * 64, "control": "random"} for seed in SEEDS},
        "other_gates": {str(seed): {"sha256": "f" * 64} for seed in SEEDS},
    }
    return rates, manifest


def test_other_lines_with_its_gates_are_shown_beside() -> None:
    rates, manifest = with_gate_model()
    scores = gather(make_rows(rates), list(FAMILY))
    names = {"policy": "fused", "gate": "gate", "oracle": "oracle"}
    parts = parts_of(scores, [manifest], **names)
    assert parts.also == ("gate_model",)
    plain = parts_of(scores, [manifest], **names, also=())
    assert plain.also == ()
    assert parts_of(scores, [manifest], **names, also=("untrained",)).also == ("untrained",)
    with pytest.raises(ValueError, match=r"also is 'gate_modle', which was not measured \(did you mean"):
        parts_of(scores, [manifest], **names, also=("gate_modle",))
    for check in (partial(check_better, **OPTIONS), check_not_worse):
        claim, alone = check(scores, parts), check(scores, plain)
        beside = [one for one in claim.lines if one.against == "gate_model"]
        assert len(beside) == 3 * 16 and not any(one.required for one in beside)
        assert {one.outcome for one in beside} <= {"does not hold", "undecided"}
        own = line_of(claim, "context_only", 0.1, "all", "gate_model")
        assert (own.outcome, own.estimate) == ("does not hold", pytest.approx(-7.5))
        # They are families of their own: what is claimed stays as it is.
        assert [one for one in claim.lines if one.against != "gate_model"] == [*alone.lines]


def test_presets_that_nobody_measured_are_named() -> None:
    there = PARTS.unmeasured
    assert {*there} == {"context_only", "query_aware"}
    assert {"lava", "adakv", "random", "streaming_llm"} <= {*there["context_only"]}
    assert not {"snapkv", "keydiff", "gate", "fused", "full"} & {*there["context_only"]}


def test_several_runs_are_read_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The regimes that share a prefill from one run, the others from another with fewer items."""
    rates = complete(changed(oracle=(0.9, 0.8, 0.7)))
    shared = {cell: own for cell, own in rates.items() if cell[0] in ("context_only", "query_aware")}
    others = {cell: own for cell, own in rates.items() if cell not in shared}
    folders = []
    for name, own, items in (("one", shared, 80), ("two", others, 70)):
        (tmp_path / name).mkdir()
        folders.append(str(write_run(tmp_path / name, make_manifest(run=name), own, items)))
    assert main([*folders, "--resamples", "300", "--check"]) == 0
    assert capsys.readouterr().out.count("holds: ") == 4
    found = json.loads((tmp_path / "one" / "claims.json").read_text(encoding="utf-8"))
    assert (found["run"], found["holds"]) == ("one and two", True)
    assert found["conditions"][0]["numbers"].startswith("210 (")  # of the run that has the fewest
    lines = {(one["regime"], one["budget"], one["family"]): one for one in found["claims"][1]["lines"]}
    assert lines["context_only", 0.4, "all"]["num_items"] == 720
    assert lines["decode", 0.4, "all"]["num_items"] == 630
    assert lines["decode", 0.4, "all"]["note"].endswith("one of 16")
    page = (tmp_path / "one" / "claims.md").read_text(encoding="utf-8")
    assert "Training-free presets that were not measured in decode: " in page and "lava" in page
    # Alone the first says less.
    assert main([folders[0], "--resamples", "300", "--check"]) == 1
    assert "undecided: context_only, query_aware, chunked and decode" in capsys.readouterr().out


def test_runs_that_are_not_of_one_kind_are_refused() -> None:
    regimes = {regime: {c: o for c, o in complete(RATES).items() if c[0] == regime} for regime in WANTED_IN}
    one, two = (gather(make_rows(regimes[name], items=4), list(FAMILY)) for name in ("chunked", "decode"))
    manifest = make_manifest()
    manifest["identity"]["policies"] = {"fused": LEARNED}
    assert join([(one, manifest)]) is one
    both = join([(one, manifest), (two, make_manifest(run="two"))])
    assert both.regimes == ["chunked", "decode"] and both.num_items(["copy"]) == 12
    assert both.mean(Cell("decode", "fused", 0.4), ["copy"]) == one.mean(
        Cell("chunked", "fused", 0.4), ["copy"]
    )
    with pytest.raises(ValueError, match="made measured chunked, and so did a run before it"):
        join([(one, manifest), (one, manifest)])
    fewer = gather([row for row in make_rows(regimes["decode"], items=4) if row["task"] != "odd"])
    with pytest.raises(ValueError, match="two asked the tasks copy, pair, and made asked copy, pair, odd"):
        join([(one, manifest), (fewer, make_manifest(run="two"))])
    other = make_manifest(run="two")
    other["identity"]["policies"] = {"fused": {**LEARNED, "scope": "head"}}
    other["identity"]["gates"]["1"] = {"sha256": "e" * 64}
    with pytest.raises(
        ValueError, match=r"'fused' is another policy in two than in made; .*other gates in two"
    ):
        join([(one, manifest), (two, other)])


def test_what_is_wanted_and_was_not_measured_is_a_line() -> None:
    """Of every regime and budget, whatever the run happens to have; a claim that lacks one does not hold."""
    claim = check_not_worse(SCORES, PARTS)
    lacking = {
        (one.regime, one.budget) for one in claim.lines if one.outcome == "not measured" and one.required
    }
    there = {("context_only", 0.1), ("context_only", 0.2), ("query_aware", 0.4)}
    assert lacking == {(regime, budget) for regime in WANTED_IN for budget in WANTED_AT} - there
    assert claim.outcome == "undecided"
    scores, parts = check_of(complete(RATES))
    whole = check_not_worse(scores, parts)
    assert not [one for one in whole.lines if one.outcome == "not measured"]
    assert whole.outcome == "holds"
    assert "chunked and decode at keep_ratio 0.05, 0.1, 0.2 and 0.4" in whole.text
