"""What a run leaves on disk, and what a killed one may leave."""

import errno
import json
import resource
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from retain.eval import compare as entry
from retain.eval.run.results_store import (
    ITEMS,
    MANIFEST,
    REFERENCES,
    Asking,
    Reference,
    Row,
    append_unit,
    finished,
    full_disk_explained,
    gates_identity,
    open_run,
    read_manifest,
    read_references,
    read_rows,
    take_up,
)
from retain.gates import build_gates
from retain.gates.artifact import save_gates
from retain.process.provenance import code_state
from tests.eval.made_run import make_rows
from tests.refused import refused

(MADE, *_) = make_rows(())


def row(unit: str, item: int, rows: int = 1) -> Row:
    return replace(MADE, unit=unit, item=item, unit_rows=rows)


def manifest(**identity):
    return {"identity": identity, "code": {"commit": "a", "clean": True}, "started": "then"}


def later(**identity):
    return {**manifest(**identity), "code": {"commit": "b", "clean": False}, "started": "now"}


def test_a_run_remembers_when_it_began_and_what_code_wrote_to_it_where(tmp_path):
    here, there = ({"environment": {"processor": name}} for name in ("here", "there"))
    open_run(tmp_path, manifest(x=1) | here, ["a", "b"])
    append_unit(tmp_path, [row("a", 0)])
    for _ in range(2):
        again = open_run(tmp_path, later(x=1) | there, ["a", "b"])
    assert again["started"] == "then"
    assert [state["commit"] for state in again["code_states"]] == ["a", "b"]
    assert again["environments"] == [here["environment"], there["environment"]]


@pytest.mark.parametrize("empty_file", [False, True])
def test_a_run_without_rows_starts_over(tmp_path, empty_file):
    open_run(tmp_path, manifest(n=3), ["a"])
    append_unit(tmp_path, [], [asked(0)])  # died between the two
    append_unit(tmp_path, [], [asked(1)], rank=1)
    for name in (ITEMS, "items-1.jsonl") if empty_file else ():
        (tmp_path / name).touch()
    fresh = open_run(tmp_path, later(n=4), ["a"])
    assert (fresh["identity"], fresh["started"], len(fresh["code_states"])) == ({"n": 4}, "now", 1)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_another_identity_is_refused_by_field(tmp_path):
    append_unit(tmp_path, [row("a", 0)])
    refused("nothing says what made those rows", open_run, tmp_path, manifest(), ["a", "b"])
    (tmp_path / ITEMS).unlink()
    open_run(tmp_path, manifest(config={"seeds": (0,), "n": 3}), ["a", "b"])
    append_unit(tmp_path, [row("a", 0)])
    open_run(tmp_path, manifest(config={"seeds": (0,), "n": 3}), ["a", "b"])
    other = manifest(config={"seeds": (0, 1), "n": 3})
    refused(r"config.seeds \(\[0\] there, \[0, 1\] now\)", open_run, tmp_path, other, ["a", "b"])


def test_gates_are_their_weights_and_not_where_they_came_from(tmp_path):
    def saved(seed, commit):
        torch.manual_seed(seed)
        gates = build_gates("linear", {0: {"E": 8, "H": 2}})
        made = {"provenance": {"commit": commit}, "base_model": commit}
        return gates_identity(save_gates(gates, tmp_path / commit, fingerprint={}, metadata=made))

    assert saved(0, "a") == saved(0, "b") != saved(1, "c")
    assert saved(0, "a")["family"] == "linear"


def test_code_outside_a_checkout_is_not_clean_and_nothing_is_read_of_an_empty_folder(tmp_path):
    assert code_state(tmp_path) == {"commit": None, "clean": False}
    with pytest.raises(FileNotFoundError, match="nothing was measured there yet"):
        read_rows(tmp_path)
    assert read_references(tmp_path / "none") == []


def asked(item: int, **changes) -> Reference:
    return replace(Reference(0, "t", item, 0, "abc", 10, (1, 2), (3,), ("three",)), **changes)


def test_what_several_processes_wrote_is_taken_into_one_file(tmp_path):
    append_unit(tmp_path, [row("a", 0)], [asked(0)])
    append_unit(tmp_path, [row("b", 1, 2), row("b", 2, 2)], [asked(2), asked(1)], rank=0)
    append_unit(tmp_path, [row("a", 0)], [asked(0)], rank=1)  # once more: of an earlier, killed taking up
    append_unit(tmp_path, [row("c", 3, 2)], [asked(3)], rank=1)  # half of a unit
    with (tmp_path / "references-1.jsonl").open("a") as file:
        file.write('{"seed": 0, "ta')
    units, back = ["a", "b", "c"], read_rows(tmp_path)
    assert [(own["unit"], own["item"]) for own in back] == [("a", 0), ("b", 1), ("b", 2), ("c", 3)]
    assert back[0]["tokens"] == [0, 1] and set(back[0]) == set(Row.__dataclass_fields__)
    assert finished(tmp_path, units) == {"a", "b"}
    assert len(list(tmp_path.iterdir())) == 6  # nothing was changed by looking
    assert take_up(tmp_path, units) == {"a", "b"} == take_up(tmp_path, units)
    assert sorted(path.name for path in tmp_path.iterdir()) == [ITEMS, REFERENCES]
    assert [own["item"] for own in read_rows(tmp_path)] == [0, 1, 2]
    told = read_references(tmp_path)
    assert [own["item"] for own in told] == [0, 1, 2, 3] and told[1]["references"] == ["three"]


def test_torn_lines_and_lines_that_are_no_object_are_dropped(tmp_path):
    append_unit(tmp_path, [row("a", 0)], [asked(0)])
    for name in (ITEMS, REFERENCES):
        with (tmp_path / name).open("a") as file:
            file.write('12\n[1]\nnull\n"a"\n{"seed": 0')
    assert finished(tmp_path, ["a"]) == {"a"} == take_up(tmp_path, ["a"])
    assert finished(tmp_path, ["b"]) == set()  # units of another plan are none of this run
    append_unit(tmp_path, [row("b", 1)], [asked(1)])
    assert [own["item"] for own in read_references(tmp_path)] == [0, 1]
    assert len(read_rows(tmp_path)) == 2
    assert (tmp_path / ITEMS).read_text().count("\n") == (tmp_path / REFERENCES).read_text().count("\n") == 2


def test_what_was_asked_is_written_once_and_must_stay_the_same(tmp_path):
    append_unit(tmp_path, [row("a", 0)], [asked(0)])
    asking = Asking(tmp_path)
    assert {*asking.known} == {(0, "t", 0, 0)}
    assert asking.fresh("b", [asked(0), asked(1)]) == [asked(1)]
    assert asking.fresh("b", [asked(0), asked(1)]) == []
    for changes in ({"context_sha": "abd"}, {"question_ids": (1, 3)}, {"references": ("drei",)}):
        says = f"in b: question 0 of item 0 is not the one .*{next(iter(changes))} differ"
        refused(says, asking.fresh, "b", [asked(0, **changes)])


def test_a_full_disk_names_the_file_and_what_to_do(tmp_path):
    append_unit(tmp_path, [row("a", 0)])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))
    says = r"^cannot write \S+/items.jsonl: File too large. Next step: raise the limit on file sizes"
    try:
        with pytest.raises(OSError, match=says) as caught, full_disk_explained(tmp_path):
            append_unit(tmp_path, [row("b", item, rows=40) for item in range(40)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(caught.value).endswith("The same command then goes on behind the last whole unit.")
    assert take_up(tmp_path, ["a", "b"]) == {"a"}, "what was whole is there"


def test_a_command_on_a_full_disk_ends_in_one_line(tmp_path, monkeypatch, capsys):
    """Also where neither the system nor a library names a file."""
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(entry, "suite_of", Mock(side_effect=full))
    assert entry.main(["--config", "configs/compare/demo.yaml", f"results={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"error: cannot write {tmp_path}/" in said and "No space left on device. Next step: free" in said
    assert "set `results` to it" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"task": 3}, "with task 3"), ({"seed": None}, "with seed None"), ({}, "with no policy")],
)
def test_a_row_of_other_things_is_refused_by_its_file(changes, said, tmp_path):
    append_unit(tmp_path, [row("a", 0)])
    line = {**json.loads((tmp_path / ITEMS).read_text()), **changes}
    if not changes:
        del line["policy"]
    (tmp_path / ITEMS).write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=rf"items\.jsonl holds a row of unit 'a' {said}, which"):
        read_rows(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"config": 3}', '{"identity": []}'])
def test_a_damaged_manifest_is_refused_by_its_file(text, tmp_path):
    """Also where a run would be taken up: what made its rows is then not known."""
    with pytest.raises(FileNotFoundError, match="is no run of eval/compare.py. Pass results/<run>"):
        read_manifest(tmp_path)
    append_unit(tmp_path, [row("a", 0)])
    (tmp_path / MANIFEST).write_text(text)
    says = r"manifest\.json (is damaged|holds) .*restore it from a copy"
    refused(says, read_manifest, tmp_path)
    refused(says, open_run, tmp_path, manifest(), ["a"])
    (tmp_path / MANIFEST).write_text('{"run": "x"}')
    assert read_manifest(tmp_path) == {"run": "x"}
