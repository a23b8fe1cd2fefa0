"""Under which conditions claims may be read as such, and what the command writes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from retain.eval.claims.fused import FRESH_FROM, check_conditions, main
from retain.eval.stats.summary import Scores, gather
from tests.eval.made_claims import (
    FAMILY,
    PARTS,
    RATES,
    SCORES,
    SEEDS,
    changed,
    check_of,
    complete,
    make_manifest,
    make_rows,
    write_run,
)


def unmet(manifest: dict[str, Any], scores: Scores = SCORES) -> list[str]:
    return [one.text for one in check_conditions(scores, PARTS, [manifest]) if not one.holds]


def test_conditions_say_what_a_run_lacks() -> None:
    assert unmet(make_manifest()) == ["at least 200 items a task"]
    enough, _ = check_of(changed(), items=80)
    assert unmet(make_manifest(), enough) == []
    # Three seeds that answer with one set of gates are one.
    same = {"gates": {str(seed): {"sha256": "0" * 64} for seed in SEEDS}}
    assert unmet(make_manifest(identity=same), enough) == ["at least 3 seeds, each with gates of its own"]
    other = make_manifest()
    other["identity"]["gates_of_policies"] = {"fused": {str(s): {"sha256": f"f{s}" * 32} for s in SEEDS}}
    assert unmet(other, enough) == ["gate and fused take the same gates"]
    dirty = make_manifest(code_states=[{"commit": "a" * 40, "clean": False}])
    del dirty["finished"]
    assert unmet(dirty, enough) == ["the run is finished", "the code was clean"]


def test_items_that_something_was_chosen_on_are_found() -> None:
    enough, _ = check_of(changed(), items=80)
    configs = {"low": {"suite": "stub", "first_item": FRESH_FROM - 1}, "older": {"suite": "stub"}}
    runs = [make_manifest(), *(make_manifest(run=run, config=own) for run, own in configs.items())]
    assert [len(unmet(run, enough)) for run in runs] == [0, 1, 1]
    (found,) = [one for one in check_conditions(enough, PARTS, runs) if not one.holds]
    assert found.numbers == f"made from {FRESH_FROM} on, low from {FRESH_FROM - 1} on, older from 0 on"


def test_unequal_bytes_are_found() -> None:
    rows = make_rows(changed(), items=80)
    for row in rows:
        if row["policy"] == "keydiff" and row["budget"] == 0.2:
            row["bytes_held"] = round(1.01 * row["bytes_held"])
    scores = gather(rows, list(FAMILY))
    assert unmet(make_manifest(), scores) == ["equal achieved bytes in every cell"]
    numbers = [one.numbers for one in check_conditions(scores, PARTS, [make_manifest()])]
    assert "at most 1.00 % apart (keydiff, context_only, 0.2)" in numbers


def refuse(word: str) -> float:
    raise AssertionError(f"{word} is no JSON")


def test_the_command_writes_both_files_and_says_how_it_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"learned": True, "allocation": {"head_classes": None}, "scope": "model"}
    manifest = make_manifest()
    manifest["identity"]["policies"] = {"fused": settings, "gate": {**settings, "scope": "head"}}
    # A line beside that differs in nothing but its gates.
    manifest["identity"]["policies"]["wide"] = settings
    manifest["identity"]["gates_of_policies"] = {"wide": {str(s): {"sha256": f"{s}f" * 32} for s in SEEDS}}
    rates = complete(RATES)
    rates = {**rates, **{(cell[0], "wide", cell[2]): own for cell, own in rates.items() if cell[1] == "gate"}}
    folder = write_run(tmp_path, manifest, rates, 20)
    assert main([str(folder), "--resamples", "300", "--also", "wide"]) == 0
    printed = capsys.readouterr().out
    assert "condition not met: at least 200 items a task: 60 (copy)" in printed
    assert "holds: context_only, keep_ratio 0.1 and 0.2: fused is better than" in printed
    found = json.loads((folder / "claims.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert [claim["name"] for claim in found["claims"]] == [
        "better",
        "not worse",
        "near the oracle",
        "gap closed",
    ]
    assert (found["run"], found["holds"], found["parts"]["gate"]) == ("made", False, "gate")
    assert found["claims"][0]["outcome"] == "holds"
    first = found["claims"][0]["lines"][0]
    assert (first["outcome"], first["against"], first["num_items"], len(first["by_seed"])) == (
        *("holds", "snapkv", 180, 3),
    )
    page = (folder / "claims.md").read_text(encoding="utf-8")
    assert "`fused` and `gate` differ in: scope (model / head)." in page
    gates = "00000000 11111111 22222222 / 0f0f0f0f 1f1f1f1f 2f2f2f2f"
    assert f"`fused` and `wide` differ in: gates ({gates})." in page and "Shown beside: `wide`." in page
    assert "| holds | context_only | 0.1 | all | snapkv | 80.0 | 36.7 | 100.0 | +43.3 |" in page
    assert " | context_only | 0.1 | seen | keydiff | 85.0 | 35.0 | 100.0 | +90.9 | [+" in page
    heads = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert heads == {4, 18}
    assert main([str(folder), "--resamples", "300", "--check"]) == 1


def test_the_command_is_content_where_everything_holds(tmp_path: Path) -> None:
    rates = complete(changed(oracle=(0.9, 0.8, 0.7)))
    folder = write_run(tmp_path, make_manifest(), rates, 80)
    out = tmp_path / "beside"
    out.mkdir()
    assert main([str(folder), "--resamples", "300", "--check", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["claims.json", "claims.md"]
    assert not (folder / "claims.md").exists()


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is no run of eval/compare.py" in capsys.readouterr().err
    folder = write_run(tmp_path, make_manifest(), RATES, 2)
    assert main([str(folder), "--gate", "gat"]) == 2
    assert "did you mean 'gate'" in capsys.readouterr().err
