"""Several runs read as one, the conditions of a run, what stands beside the claims, and the command."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval import cli
from retain.eval.claims.command import main
from retain.eval.claims.runs import check_conditions, join
from retain.eval.stats.summary import Cell, Scores, gather
from tests.eval.made_claims import (
    CLAIMS,
    FAMILY,
    FILE,
    PARTS,
    RATES,
    SCORES,
    SEEDS,
    WANTED_IN,
    changed,
    checked,
    complete,
    line_of,
    make_manifest,
    make_rows,
    named,
    scores_of,
    write_run,
)

LEARNED = {"learned": True, "allocation": {"head_classes": None}, "scope": "model"}
FIRST = FILE.conditions.first_item


def gates(digits: str) -> dict[str, dict[str, str]]:
    """Gates whose fingerprints begin with the seed, then these digits."""
    return {str(seed): {"sha256": f"{seed}{digits}" * 16} for seed in SEEDS}


def unmet(manifest: dict[str, Any], scores: Scores) -> list[str]:
    conditions = check_conditions(scores, PARTS, [manifest], FILE.conditions)
    return [one.text for one in conditions if not one.holds]


@pytest.fixture(scope="module")
def enough() -> Scores:
    return scores_of(changed(), items=80)


def test_conditions_say_what_a_run_lacks(enough: Scores) -> None:
    assert unmet(make_manifest(), SCORES) == ["at least 200 items a task"]
    assert unmet(make_manifest(), enough) == []
    # Three seeds that answer with one set of gates are one.
    same = {"gates": {str(seed): {"sha256": "0" * 64} for seed in SEEDS}}
    assert unmet(make_manifest(identity=same), enough) == ["at least 3 seeds, each with gates of its own"]
    other = make_manifest()
    other["identity"]["gates_of_policies"] = {"fused": gates("f")}
    assert unmet(other, enough) == ["gate and fused take the same gates"]
    dirty = make_manifest(code_states=[{"commit": "a" * 40, "clean": False}])
    del dirty["finished"]
    assert unmet(dirty, enough) == ["the run is finished", "the code was clean"]
    # Items that something was chosen on.
    configs = {"low": {"suite": "stub", "first_item": FIRST - 1}, "older": {"suite": "stub"}}
    runs = [make_manifest(), *(make_manifest(run=run, config=own) for run, own in configs.items())]
    assert [len(unmet(run, enough)) for run in runs] == [0, 1, 1]
    (found,) = [one for one in check_conditions(enough, PARTS, runs, FILE.conditions) if not one.holds]
    assert found.numbers == f"made from {FIRST} on, low from {FIRST - 1} on, older from 0 on"
    # Unequal bytes.
    rows = make_rows(changed(), items=80)
    for row in rows:
        if row["policy"] == "keydiff" and row["budget"] == 0.2:
            row["bytes_held"] = round(1.01 * row["bytes_held"])
    scores = gather(rows, list(FAMILY))
    assert unmet(make_manifest(), scores) == ["equal achieved bytes in every cell"]
    conditions = check_conditions(scores, PARTS, [make_manifest()], FILE.conditions)
    assert "at most 1.00 % apart (keydiff, context_only, 0.2)" in [one.numbers for one in conditions]


def test_other_lines_with_its_gates_are_shown_beside() -> None:
    """A run in which the gate under the fused policy's budget is better than it."""
    rates = {**complete(RATES)}
    for cell in [cell for cell in rates if cell[1] == "fused"]:
        rates[cell[0], "gate_model", cell[2]] = tuple(min(1.0, own + 0.075) for own in rates[cell])
        rates[cell[0], "untrained", cell[2]] = (0.1, 0.1, 0.1)
    manifest = make_manifest()
    names = ("fused", "gate", "gate_model", "untrained", "other_gates")
    manifest["identity"]["policies"] = dict.fromkeys(names, LEARNED)
    control = {seed: {**own, "control": "random"} for seed, own in gates("0").items()}
    manifest["identity"]["gates_of_policies"] = {"untrained": control, "other_gates": gates("f")}
    scores = scores_of(rates)
    parts = named(scores, manifests=[manifest])
    assert parts.also == ("gate_model",)
    # Presets that were not measured are named.
    assert {*PARTS.unmeasured} == {"context_only", "query_aware"}
    presets = {*PARTS.unmeasured["context_only"]}
    assert {"lava", "adakv", "random", "streaming_llm"} <= presets
    assert not {"snapkv", "keydiff", "gate", "fused", "full"} & presets
    plain = named(scores, manifests=[manifest], also=())
    assert plain.also == () and named(scores, also=("untrained",)).also == ("untrained",)
    with pytest.raises(ValueError, match=r"also is 'gate_modle', which was not measured \(did you mean"):
        named(scores, also=("gate_modle",))
    for name in ("better", "not worse"):
        claim, alone = checked(name, scores, parts), checked(name, scores, plain)
        beside = [one for one in claim.lines if one.against == "gate_model"]
        assert len(beside) == 3 * 16 and not any(one.required for one in beside)
        assert {one.outcome for one in beside} <= {"does not hold", "undecided"}
        own = line_of(claim, "context_only", 0.1, "all", "gate_model")
        assert (own.outcome, own.estimate) == ("does not hold", pytest.approx(-7.5))
        # They are families of their own: what is claimed stays as it is.
        assert [one for one in claim.lines if one.against != "gate_model"] == [*alone.lines]


def test_runs_that_are_not_of_one_kind_are_refused() -> None:
    regimes = {regime: {c: o for c, o in complete(RATES).items() if c[0] == regime} for regime in WANTED_IN}
    one, two = (scores_of(regimes[name], items=4) for name in ("chunked", "decode"))
    manifest = make_manifest()
    manifest["identity"]["policies"] = {"fused": LEARNED}
    assert join([(one, manifest)]) is one
    both = join([(one, manifest), (two, make_manifest(run="two"))])
    assert both.regimes == ["chunked", "decode"] and both.num_items(["copy"]) == 12
    cells = Cell("decode", "fused", 0.4), Cell("chunked", "fused", 0.4)
    assert both.mean(cells[0], ["copy"]) == one.mean(cells[1], ["copy"])
    with pytest.raises(ValueError, match="made measured chunked, and so did a run before it"):
        join([(one, manifest), (one, manifest)])
    fewer = gather([row for row in make_rows(regimes["decode"], items=4) if row["task"] != "odd"])
    with pytest.raises(ValueError, match="two asked the tasks copy, pair, and made asked copy, pair, odd"):
        join([(one, manifest), (fewer, make_manifest(run="two"))])
    other = make_manifest(run="two")
    other["identity"]["policies"] = {"fused": {**LEARNED, "scope": "head"}}
    other["identity"]["gates"]["1"] = {"sha256": "e" * 64}
    with pytest.raises(
        ValueError, match="'fused' is another policy in two than in made; .*other gates in two"
    ):
        join([(one, manifest), (two, other)])


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")


def test_the_command_writes_both_files_and_says_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = make_manifest()
    # A line beside that differs in nothing but its gates.
    narrow = {**LEARNED, "scope": "head"}
    manifest["identity"]["policies"] = {"fused": LEARNED, "gate": narrow, "wide": LEARNED}
    manifest["identity"]["gates_of_policies"] = {"wide": gates("fff")}
    rates = complete(RATES)
    rates = {**rates, **{(cell[0], "wide", cell[2]): own for cell, own in rates.items() if cell[1] == "gate"}}
    folder = write_run(tmp_path, manifest, rates, 20)
    assert cli.main(["claims", str(folder), "--resamples", "300", "--also", "wide"]) == 0
    printed = capsys.readouterr().out
    assert "condition not met: at least 200 items a task: 60 (copy)" in printed
    assert "holds: context_only, keep_ratio 0.1 and 0.2: fused is better than" in printed
    found = json.loads((folder / "claims.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert [claim["name"] for claim in found["claims"]] == [*CLAIMS]
    assert (found["run"], found["holds"], found["parts"]["gate"]) == ("made", False, "gate")
    first = found["claims"][0]["lines"][0]
    assert [first[name] for name in ("outcome", "against", "num_items")] == ["holds", "snapkv", 180]
    assert len(first["by_seed"]) == 3
    page = (folder / "claims.md").read_text(encoding="utf-8")
    assert "`fused` and `gate` differ in: scope (model / head)." in page
    said = "00000000 11111111 22222222 / 0fff0fff 1fff1fff 2fff2fff"
    assert f"`fused` and `wide` differ in: gates ({said})." in page and "Shown beside: `wide`." in page
    assert "| holds | context_only | 0.1 | all | snapkv | 80.0 | 36.7 | 100.0 | +43.3 |" in page
    assert " | context_only | 0.1 | seen | keydiff | 85.0 | 35.0 | 100.0 | +90.9 | [+" in page
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {4, 18}
    assert main([str(folder), "--resamples", "300", "--check"]) == 1


def test_several_runs_are_read_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The regimes that share a prefill from one run, the others from another with fewer items."""
    rates = complete(changed(oracle=(0.9, 0.8, 0.7)))
    shared = {cell: own for cell, own in rates.items() if cell[0] in ("context_only", "query_aware")}
    others = {cell: own for cell, own in rates.items() if cell not in shared}
    folders = []
    for name, own, items in (("one", shared, 80), ("two", others, 70)):
        (tmp_path / name).mkdir()
        folders.append(str(write_run(tmp_path / name, make_manifest(run=name), own, items)))
    out = tmp_path / "beside"
    out.mkdir()
    assert main([*folders, "--resamples", "300", "--check", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("holds: ") == 4
    assert not (tmp_path / "one" / "claims.md").exists()
    found = json.loads((out / "claims.json").read_text(encoding="utf-8"))
    assert (found["run"], found["holds"]) == ("one and two", True)
    assert found["conditions"][0]["numbers"].startswith("210 (")  # of the run that has the fewest
    lines = {(one["regime"], one["budget"], one["family"]): one for one in found["claims"][1]["lines"]}
    assert lines["context_only", 0.4, "all"]["num_items"] == 720
    assert lines["decode", 0.4, "all"]["num_items"] == 630
    assert lines["decode", 0.4, "all"]["note"].endswith("one of 16")
    page = (out / "claims.md").read_text(encoding="utf-8")
    assert "Training-free presets that were not measured in decode: " in page and "lava" in page
    # Alone the first says less.
    assert main([folders[0], "--resamples", "300", "--check"]) == 1
    assert "undecided: context_only, query_aware, chunked and decode" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path, make_manifest(), RATES, 2))
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "is no run of eval/compare.py"),
        ([folder, "--gate", "gat"], "did you mean 'gate'"),
        ([folder, "--claims", str(tmp_path / "no.yaml")], "does not exist"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
