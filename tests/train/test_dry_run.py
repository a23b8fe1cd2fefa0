"""A dry run makes one real step, on the longest documents, and writes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retain.config import to_mapping
from retain.train.distill import main
from retain.train.run import dry_run as module


def test_one_real_step_on_the_longest_documents(
    make_config: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = []

    def taken(lesson: Any, *given: Any) -> dict[str, Any]:
        before = [parameter.clone() for parameter in lesson.objective.gates.parameters()]
        records.append(record := inner(lesson, *given))
        after = list(lesson.objective.gates.parameters())
        assert any(bool((one != two).any()) for one, two in zip(before, after, strict=True))
        sizes = sorted(map(lesson.size_of, lesson.corpus.train))
        assert sizes[0] > 50, "documents have 43 to 77 tokens"
        return record

    inner = module.take_step_
    monkeypatch.setattr(module, "take_step_", taken)
    config = make_config()
    (tmp_path / "c.yaml").write_text(json.dumps(to_mapping(config)))
    main(["--config", str(tmp_path / "c.yaml"), "--dry-run"])
    said = capsys.readouterr().out
    assert f"one step of 4 documents, {records[0]['tokens']} tokens" in said
    assert "GiB on cpu. 8 such steps take" in said
    assert len(records) == 1 and not Path(config.output).exists()
