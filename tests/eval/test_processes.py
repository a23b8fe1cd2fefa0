"""A run that is killed, and a run of several processes, end in the rows of one that was left alone."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from retain.eval import compare as entry
from retain.eval.compare import compare
from retain.eval.run.processes import Processes, launched
from retain.eval.run.results_store import ITEMS, MANIFEST, read_references, read_rows
from retain.eval.stats.ceilings import CELLS
from retain.process.lock import LOCK_FILE, lock_folder
from tests.eval.run_stub import config_of
from tests.eval.stub import MORE_STUB
from tests.launch import ROOT, launch_environment


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    config = config_of(tmp_path_factory.mktemp("whole"), "whole")
    compare(config, MORE_STUB)
    return config.folder


def sorted_rows(folder: Path) -> list[str]:
    rows = [{**row, "run": ""} for row in read_rows(folder)]
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def same_tables(folder: Path, other: Path) -> None:
    assert sorted_rows(folder) == sorted_rows(other)
    assert read_references(folder) == read_references(other)
    assert (folder / CELLS).read_text() == (other / CELLS).read_text()
    assert [path.name for path in folder.glob("items*.jsonl")] == [ITEMS]
    assert not (folder / LOCK_FILE).exists()


def test_killed_at_random_moments_it_goes_on_to_the_same_tables(tmp_path, whole):
    done = subprocess.run(
        [sys.executable, "-m", "tests.eval.run_stub", "kill", str(tmp_path), "7"],
        cwd=ROOT,
        env=launch_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    attempts = [line.split() for line in done.stdout.splitlines() if line.endswith(" of 12")]
    counts = [int(count) for _, count, *_ in attempts]
    assert counts == sorted(counts) and counts[-1] == 12  # what is done stays done
    assert len(attempts) == 7 and len(set(counts)) > 2, done.stdout
    same_tables(tmp_path / "results" / "killed", whole)


def test_two_processes_of_a_launcher_share_the_units(tmp_path, whole):
    for extra in (["kill", "1"], []):
        done = subprocess.run(
            [
                # `--cpu` alone starts one process.
                *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
                *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
                *("--main_process_port", "0", "tests/eval/run_stub.py", "launched", str(tmp_path), *extra),
            ],
            cwd=ROOT,
            env=launch_environment(ACCELERATE_USE_CPU="true"),
            capture_output=True,
            text=True,
            timeout=300,
        )
        folder = tmp_path / "results" / "several"
        assert (done.returncode == 0) == (not extra), done.stderr[-3000:]
        if extra:  # the second process died behind its first unit: both have files of their own
            assert {row["unit"] for row in read_rows(folder)}
            assert (folder / "items-1.jsonl").exists() and not (folder / CELLS).exists()
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["processes"] == 2  # launchers have been seen to start one
    same_tables(folder, whole)


def test_a_process_is_alone_or_leaves_its_group():
    assert launched() == Processes() and Processes().writes_as is None and Processes().first
    state = Mock()
    with Processes().until_done(), Processes(rank=1, count=2, state=state).until_done() as second:
        assert second.writes_as == 1 and not state.destroy_process_group.called
    state.destroy_process_group.assert_called_once_with()


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_a_command_of_several_leaves_them_done_or_refused(monkeypatch, error):
    state, path = Mock(), ROOT / "configs/compare/demo.yaml"
    monkeypatch.setattr(entry, "launched", lambda: Processes(rank=1, count=2, state=state))
    monkeypatch.setattr(entry, "compare", Mock(side_effect=error, return_value=(path, ())))
    assert entry.main(["--config", str(path)]) == (0 if error is None else 2)
    state.destroy_process_group.assert_called_once_with()


def test_two_runs_in_one_folder_are_refused(tmp_path, whole):
    config = config_of(tmp_path, "held")
    before = {path.name for path in whole.iterdir()}
    with (
        lock_folder(config.folder, otherwise="another"),
        pytest.raises(ValueError, match=r"held by another run: process .*another name \(run=\.\.\.\)"),
    ):
        compare(config, MORE_STUB)
    assert {path.name for path in whole.iterdir()} == before
    assert not config.folder.exists()
