"""Every number of every config has a range, which is checked when the config is read."""

from pathlib import Path
from typing import Any

import pytest

from retain.config import build
from retain.train.recipe import DistillConfig

ROOT = Path(__file__).resolve().parents[1]
# What training was killed by after its last step, or refused only once the model was there.
OUTSIDE = {
    **dict.fromkeys(("training.clip", "training.eps", "training.lr"), 0.0),
    **dict.fromkeys(("loss.temperature", "loss.band"), 0.0),
    **dict.fromkeys(("training.final_lr", "training.weight_decay"), -1.0),
    "soft.hard_temperature": 0.0,
    **dict.fromkeys(("soft.keep_from", "soft.keep_to"), 1.5),
    **dict.fromkeys(("seed", "training.warmup_steps", "data.pack_tokens", "soft.sinks"), -1),
    **dict.fromkeys(("training.steps", "training.micro_batch", "target.horizon"), 0),
    **dict.fromkeys(("data.shuffle_rows", "target.repeat_chunk"), 0),
    "soft.budget": 0,
    **dict.fromkeys(("data.max_tokens", "data.documents"), 10**12),
    "data.held_out_share": 0.0,
    "training.betas": [1.5, 2],
    "loss.keep_ratios": [1.2],
    "loss.terms": {"mse": -1.0},
    "soft.terms": {"admitted": -1.0},
    "target.sources": {"own": -1.0},
}


@pytest.mark.parametrize("key", OUTSIDE)
def test_what_is_outside_is_refused_by_its_key(key: str) -> None:
    section, _, last = key.rpartition(".")
    given = {last: OUTSIDE[key]}
    mapping: dict[str, Any] = {"output": "o"} | ({section: given} if section else given)
    with pytest.raises(ValueError, match="problem") as caught:
        build(mapping, DistillConfig)
    assert f"- {key}" in str(caught.value)
