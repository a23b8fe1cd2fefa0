"""The bar's numbers, and what is asked of trackers."""

import io
from pathlib import Path

import pytest

from retain.train.run import progress
from retain.train.run.progress import TRACKERS, Progress, tracked, tracker_options
from tests.refused import refused


def test_the_bar_shows_loss_overlap_and_the_time_left() -> None:
    written = io.StringIO()
    with Progress(10, 4, True, file=written, mininterval=0.0, dynamic_ncols=False, ncols=200) as bar:
        bar.step(tokens=5000, loss=1.25)
        bar.step(tokens=5000, loss=1.0, held_out=0.5)
        bar.step(tokens=0, loss=0.5)
    text = written.getvalue()
    assert "5/10" in text and "7/10" in text and "4/10" in text
    assert "tokens=5,000" in text and "loss=1.250" in text and "held-out=0.500" in text and "<" in text


@pytest.mark.parametrize("name", [name for name in TRACKERS if name != "none"])
def test_a_tracker_that_is_missing_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "find_spec", lambda package: None)
    refused(
        rf'needs the package .{TRACKERS[name][0]}.*"retain-kv\[{name}\]"', tracker_options, name, tmp_path
    )
    monkeypatch.setattr(progress, "find_spec", lambda package: object())
    assert tracker_options(name, tmp_path) == {"log_with": name, "project_dir": str(tmp_path / "tracker")}


def test_trackers_are_off_unless_asked_for_and_take_flat_numbers(tmp_path: Path) -> None:
    assert tracker_options("none", tmp_path) == {}
    record = {
        **{"step": 3, "loss": 0.5, "documents": [[1]], "ok": True},
        "held_out": {"overlap": 0.4, "overlap_of": {"0": [0.1]}},
    }
    assert tracked(record) == {"loss": 0.5, "held_out/overlap": 0.4}
