"""A tiny model in a folder and documents of token ids beside it: what every training test runs on."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

SMALL = """
dtype: float32
data: {source: jsonl, documents: 0, held_out: 4, held_out_share: 0.25, min_tokens: 20, max_tokens: 100}
gate: {family: mlp, settings: {F: 16}}
target: {horizon: 8}
training: {steps: 8, batch_documents: 4, micro_batch: 3, lr: 1.0e-2, warmup_steps: 2,
  held_out_every: 4, checkpoint_every: 4}
"""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Not above: this file may be read before tests/conftest.py has said how Triton runs, which it asks once.
    from tests.tiny import tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("qwen3", num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


@pytest.fixture(scope="session")
def documents_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    rows = [
        {
            "context_ids": [1] + [draw.randrange(2, 97) for _ in range(draw.randrange(40, 70))],
            "appendix_ids": [draw.randrange(2, 97) for _ in range(draw.randrange(3, 9))],
        }
        for _ in range(20)
    ]
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_config(tiny_folder: Path, documents_path: Path, tmp_path: Path) -> Callable[..., Any]:
    """`make_config(**{"training.steps": 3})`: a small run with some keys changed."""

    def make(**changes: Any) -> Any:
        from retain.config import build
        from retain.train.recipe import DistillConfig

        mapping: dict[str, Any] = yaml.safe_load(SMALL)
        mapping |= {"output": str(tmp_path / "run"), "model": str(tiny_folder)}
        mapping["data"]["path"] = str(documents_path)
        for key, value in changes.items():
            section, _, name = key.rpartition(".")
            (mapping.setdefault(section, {}) if section else mapping)[name] = value
        return build(mapping, DistillConfig)

    return make
