"""Decoded tokens as written and compiled, timed on a model of two layers."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from retain.eval.compiled_steps import measure
from retain.eval.speed import Setting


def test_each_way_is_timed_and_each_aim_is_said_to_hold_or_not():
    shape = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "intermediate": 32}
    setting = Setting(
        model="random", policies=("snapkv", "merge"), keep_ratios=(0.4,), gates="random", tokens=320,
        steps=2, rounds=2, threads=1, **shape,
    )  # fmt: skip
    with pytest.raises(ValueError, match="pass one of each"):
        measure(replace(setting, batches=(1, 2)), torch.compile)
    head, *lines = measure(setting, partial(torch.compile, backend="eager"))
    rows, aims = lines[:9], lines[9:]
    assert "ms" in head and len({re.split(r"  +", row)[0] for row in rows}) == 9
    assert len(aims) == 5 and all(
        re.match(r"(held|\*\*NOT held\*\*): .* at most 1\.[01]5", line) for line in aims
    )
