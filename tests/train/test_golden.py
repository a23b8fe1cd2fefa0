"""The golden loss curve of a small run.

Remake it with `python -m tests.train.test_golden`, and say why in the commit.
"""

import json
import random
import tempfile
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "distill_tiny.json"
COMMAND = "python -m tests.train.test_golden"
# Another machine's matrix products round differently, and 20 steps of AdamW amplify that; measured spread is
# far below.
TOLERANCE = 2e-3


def curve() -> list[float]:
    """Losses of 20 steps on a tiny random model and random documents, everything from fixed seeds."""
    from retain.config import build
    from retain.train.distill import distill
    from retain.train.recipe import DistillConfig
    from retain.train.run.checkpoint import read_log
    from tests.tiny import tiny_model

    draw = random.Random(7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model("qwen3", seed=3).save_pretrained(folder / "model")
        rows = [
            {"context_ids": [1] + [draw.randrange(2, 97) for _ in range(draw.randrange(60, 90))]}
            for _ in range(40)
        ]
        (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "output": str(folder / "run"),
            "model": str(folder / "model"),
            "dtype": "float32",
            "data": {
                "source": "jsonl",
                "path": str(folder / "documents.jsonl"),
                "documents": 0,
                "held_out": 0,
                "min_tokens": 40,
            },
            "gate": {"family": "mlp", "settings": {"F": 32}},
            "target": {"horizon": 16},
            "training": {"steps": 20, "batch_documents": 4, "checkpoint_every": 0, "warmup_steps": 4},
        }
        run = distill(build(config, DistillConfig))
        return [record["loss"] for record in read_log(run)]


def test_golden_curve() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["command"] == COMMAND
    found = curve()
    assert found[-1] < found[0], "it learns"
    assert found == pytest.approx(golden["loss"], rel=TOLERANCE)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({"command": COMMAND, "loss": curve()}, indent=2) + "\n")
