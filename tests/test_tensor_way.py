"""Traces the way of one tensor in a prefill under `gate`: hidden state, gate, score, keep mask, attention."""

import re
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import retain
from retain.hf.version_names import CACHE
from retain.reference import load_model

ROOT = Path(retain.__file__).parents[1]
MOST = 15  # files that a newcomer reads to follow the tensor


def carries(value: Any, depth: int = 2) -> bool:
    """Tell activations, scores and keep masks [B, H, T] from weights, ids, counts and padding masks."""
    if isinstance(value, torch.Tensor):
        keep = value.dtype == torch.bool and value.ndim == 3
        return (
            value.numel() > 1 and not isinstance(value, nn.Parameter) and (value.is_floating_point() or keep)
        )
    if isinstance(value, dict):
        value = list(value.values())
    return depth > 0 and isinstance(value, list | tuple) and any(carries(each, depth - 1) for each in value)


def test_a_prefill_takes_the_tensor_through_fifteen_files() -> None:
    model = load_model()
    ids = torch.randint(20, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    gates = retain.new_gates(model)
    passed: dict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(ROOT)):
            return
        named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        given = [frame.f_locals.get(name) for name in code.co_varnames[:named]] if event == "call" else result
        file = Path(code.co_filename).relative_to(ROOT)
        if file.parts[0] in ("retain", "kernels") and carries(given):
            passed[file.as_posix()].add(code.co_qualname)

    with retain.attach(model), torch.no_grad():
        # What is checked once a model comes first.
        model(ids, **{CACHE: retain.Cache(model, policy="gate", keep_ratio=0.2, gates=gates)})
        cache = retain.Cache(model, policy="gate", keep_ratio=0.2, gates=gates)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            model(ids, **{CACHE: cache}, use_cache=True)
        finally:
            sys.setprofile(before)
    assert cache.report().total.entries_evicted > 0
    _, _, listed = (ROOT / "CONTRIBUTING.md").read_text().partition("## Follow one tensor")
    assert sorted(passed) == sorted(re.findall(r"^- `([\w/]+\.py)`", listed, flags=re.MULTILINE))
    assert len(passed) <= MOST, {file: sorted(names) for file, names in passed.items()}
