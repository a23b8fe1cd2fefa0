"""A run's folder: fresh, to be resumed, finished, or somebody else's; a log that can be rewound."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from retain.train.checkpoint import (
    CHECKPOINTS,
    DELETED,
    append_log,
    begin_,
    check_inputs,
    describe_inputs,
    finish_,
    inspect_run,
    latest,
    read_log,
    rewind_log_,
)
from retain.train.data import Corpus, Document

INPUTS = {"base model": "abc", "documents": "def"}
CONFIG = {"seed": 0, "training": {"lr": 1e-5, "betas": (0.9, 0.99)}, "overwrite": False, "resume": True}


def state(folder: Path, config: dict = CONFIG, *, overwrite: bool = False, resume: bool = True) -> str:
    return inspect_run(folder, config, overwrite=overwrite, resume=resume)


def test_a_run_from_beginning_to_end(tmp_path: Path) -> None:
    assert state(tmp_path / "new") == "fresh"
    begin_(tmp_path, CONFIG, INPUTS)
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
    begin_(tmp_path, CONFIG, INPUTS)
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
    begin_(tmp_path, CONFIG, INPUTS)
    assert (tmp_path / "gates.json").exists() and read_log(tmp_path) == []


def test_other_models_and_other_documents_are_told_apart(tmp_path: Path) -> None:
    one, two = Document((1, 2, 3), (4,)), Document((1, 2), (3, 4))
    corpora = [
        Corpus((one, two), ()),
        Corpus((two, one), ()),
        Corpus((one,), (two,)),
        Corpus((one, one), ()),
        Corpus((one, Document((1, 2, 3, 4))), ()),
    ]
    assert len({describe_inputs("abc", corpus)["documents"] for corpus in corpora}) == len(corpora)
    begin_(tmp_path, CONFIG, describe_inputs("abc", corpora[0]))
    check_inputs(tmp_path, describe_inputs("abc", Corpus((one, two), ())))
    with pytest.raises(
        ValueError, match=r"\(base model: sha256 abc -> abd\): choose another .*overwrite=true"
    ):
        check_inputs(tmp_path, describe_inputs("abd", corpora[0]))
    before, now = (describe_inputs("abc", corpus)["documents"] for corpus in corpora[:2])
    with pytest.raises(
        ValueError, match=rf"\(documents: sha256 {before} -> {now}\): choose another `output`"
    ):
        check_inputs(tmp_path, describe_inputs("abc", corpora[1]))
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match="base model: sha256 not recorded -> abc; documents: sha256 not"):
        check_inputs(tmp_path, describe_inputs("abc", corpora[0]))


@pytest.mark.parametrize("remove", [finish_, lambda folder: begin_(folder, CONFIG, INPUTS)])
def test_a_kill_while_checkpoints_are_deleted_leaves_none_to_believe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove: Any
) -> None:
    begin_(tmp_path, CONFIG, INPUTS)
    step = tmp_path / CHECKPOINTS / "step-000010"
    step.mkdir()
    (step / "model.safetensors").touch()

    def killed(path: Path) -> None:
        assert path == tmp_path / DELETED
        (path / "step-000010" / "model.safetensors").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(tmp_path)
    assert latest(tmp_path) is None and (tmp_path / DELETED).exists()
    remove(tmp_path)
    assert not (tmp_path / DELETED).exists() and latest(tmp_path) is None


def test_log_is_rewound_to_the_checkpoint(tmp_path: Path) -> None:
    for step in range(1, 6):
        append_log(tmp_path, {"step": step, "loss": 0.1 * step})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    rewind_log_(tmp_path, 3)
    assert read_log(tmp_path) == [{"step": step, "loss": 0.1 * step} for step in (1, 2, 3)]
