"""A run's folder: fresh, to be resumed, finished, or somebody else's; a log that can be rewound."""

from pathlib import Path

import pytest

from retain.train.checkpoint import (
    CHECKPOINTS,
    append_log,
    begin_,
    finish_,
    inspect_run,
    latest,
    read_log,
    rewind_log_,
)

CONFIG = {"seed": 0, "training": {"lr": 1e-5, "betas": (0.9, 0.99)}, "overwrite": False, "resume": True}


def state(folder: Path, config: dict = CONFIG, *, overwrite: bool = False, resume: bool = True) -> str:
    return inspect_run(folder, config, overwrite=overwrite, resume=resume)


def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    assert state(tmp_path / "new") == "fresh"
    begin_(tmp_path, CONFIG)
    assert state(tmp_path) == "fresh", "nothing to go on from yet"
    (tmp_path / CHECKPOINTS / "step-000010").mkdir()
    (tmp_path / CHECKPOINTS / "step-000020.new").mkdir()
    assert latest(tmp_path) == (10, tmp_path / CHECKPOINTS / "step-000010"), "half-written ones do not count"
    assert state(tmp_path) == "resume"
    with pytest.raises(ValueError, match="unfinished run of this config: drop resume=false"):
        state(tmp_path, resume=False)
    (tmp_path / "gates.json").write_text("{}")
    assert state(tmp_path) == "resume", "the artifact there is an older one"
    finish_(tmp_path)
    assert state(tmp_path) == "finished"
    assert state(tmp_path, overwrite=True) == "fresh"


def test_another_config_is_refused_with_what_differs(tmp_path: Path) -> None:
    begin_(tmp_path, CONFIG)
    other = {**CONFIG, "seed": 1, "overwrite": True, "resume": False}
    with pytest.raises(ValueError, match=r"run of another config \(seed: 0 -> 1\).*overwrite=true"):
        state(tmp_path, other)
    assert state(tmp_path, {**CONFIG, "resume": False}) == "fresh", (
        "how to start is no part of what is trained"
    )


def test_an_artifact_without_a_config_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a gate artifact and no config.yaml"):
        state(tmp_path)


def test_overwriting_leaves_the_old_artifact_for_now(tmp_path: Path) -> None:
    (tmp_path / "gates.json").write_text("{}")
    append_log(tmp_path, {"step": 1})
    begin_(tmp_path, CONFIG)
    assert (tmp_path / "gates.json").exists() and read_log(tmp_path) == []


def test_log_is_rewound_to_the_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 6):
        append_log(tmp_path, {"step": step, "loss": 0.1 * step})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    rewind_log_(tmp_path, 3)
    assert read_log(tmp_path) == [{"step": step, "loss": 0.1 * step} for step in (1, 2, 3)]
