"""The bar's numbers, and what is asked of trackers."""

import io
from pathlib import Path

import pytest

from retain.train.run import progress
from retain.train.run.progress import TRACKERS, Progress, check_tracker, tracked, tracker_options
from tests.refused import refused


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_bar_shows_rate_loss_overlap_and_the_time_left() -> None:
    clock, written = Clock(), io.StringIO()
    with Progress(
        10, 4, True, clock=clock, file=written, mininterval=0.0, dynamic_ncols=False, ncols=200
    ) as bar:
        clock.now = 2.0
        bar.step(tokens=5000, loss=1.25)
        assert bar.tokens_per_second == 2500 and bar.held_out is None
        bar.step(tokens=5000, loss=1.0, held_out=0.5)
        assert bar.tokens_per_second == 5000
        bar.step(tokens=0, loss=0.5)
        assert bar.held_out == 0.5
    text = written.getvalue()
    assert "5/10" in text and "7/10" in text and "4/10" in text
    assert "tokens/s=2.5k" in text and "loss=1.250" in text and "held-out=0.500" in text and "<" in text


def test_a_rate_is_of_the_last_steps() -> None:
    clock = Clock()
    written = io.StringIO()
    with Progress(1000, 0, False, clock=clock, file=written) as bar:
        assert bar.tokens_per_second is None
        for step in range(200):
            clock.now += 1.0
            bar.step(tokens=10 if step < 150 else 1000, loss=0.0)
        assert bar.tokens_per_second == 1000
    assert written.getvalue() == "", "where it is not shown"


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
    refused("'wandbb' is not known: choose one of none, wandb, tensorboard", check_tracker, "wandbb")
    record = {
        **{"step": 3, "loss": 0.5, "documents": [[1]], "ok": True},
        "held_out": {"overlap": 0.4, "overlap_of": {"0": [0.1]}},
    }
    assert tracked(record) == {"loss": 0.5, "held_out/overlap": 0.4}
