"""Decoding steps as written, on a CPU: how much Python stands between a query and its attention; and how much
between a hidden state and what is kept.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.kernels.decode_step import build
from tests.close import MODEL, assert_close
from tests.hf.masked import positions_of
from tests.hf.test_static_decoding import cache_of
from tests.tiny import attached, tiny_batch, tiny_model

OURS = str(Path(retain.__file__).parent)
KERNELS = str(Path(build.__file__).parents[1])


@torch.no_grad()
def step(cache: Any, model: Any, mask: torch.Tensor) -> torch.Tensor:
    given = {"input_ids": torch.full_like(mask[:, -1:], 5), "attention_mask": mask, CACHE: cache}
    return model(**given, position_ids=positions_of(mask)[:, -1:]).logits


class Frames:
    """Counts calls of functions of ours in a step, and how many of them are on the stack at once, at most."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.depth = self.deepest = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith((OURS, KERNELS)):
            return
        self.depth += 1 if event == "call" else -1
        if event == "call":
            self.calls[code.co_name] += 1
            within = frame
            while within is not None and within.f_code.co_name != "retain_attention":
                within = within.f_back
            self.deepest = max(self.deepest, self.depth) if within is not None else self.deepest

    def of(self, cache: Any, model: Any, mask: torch.Tensor) -> "Frames":
        sys.setprofile(self)
        try:
            step(cache, model, mask)
        finally:
            sys.setprofile(None)
        return self


@pytest.mark.parametrize("there", [False, True], ids=["plain", "C++"])
@pytest.mark.parametrize("policy", ["snapkv", "layer_defensivekv", "merge"])
def test_three_frames_stand_between_a_query_and_its_attention(
    monkeypatch: Any, policy: str, there: bool
) -> None:
    monkeypatch.setattr(build, "is_there", lambda: there and build.load())
    model, (ids, mask) = attached("llama"), tiny_batch((0,), 60)
    cache = cache_of(model, policy).prefill(ids, mask)
    for _ in range(2):
        mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
        frames = Frames().of(cache, model, mask)
    layers = model.config.num_hidden_layers
    assert frames.calls["retain_attention"] == frames.calls["_before_attention"] == layers
    assert 2 <= frames.deepest <= 3
    # Each layer's hook, its update of the cache, the attention function, and one or two of its rows.
    assert frames.calls["update"] == frames.calls["attend"] == layers
    assert frames.calls["attend_runs"] == layers or there and policy != "snapkv"
    assert not {"expect", "append_", "_before_layer"} & {*frames.calls}


def files_of(frame: Any) -> set[str]:
    """Files of ours on the stack."""
    found = set()
    while frame is not None:
        found.add(frame.f_code.co_filename)
        frame = frame.f_back
    return {name for name in found if name.startswith((OURS, KERNELS))}


@pytest.mark.parametrize("policy", ["snapkv", "layer_defensivekv", "learned", "merge"])
def test_a_hidden_state_reaches_a_keep_set_through_six_files(policy: str) -> None:
    model, (ids, mask) = attached("llama"), tiny_batch((0,), 60)
    cache, found = cache_of(model, policy), set()

    def profile(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{OURS}/budget/") and "keep" in code.co_name:
            found.add(frozenset(files_of(frame)))

    sys.setprofile(profile)
    try:
        with torch.no_grad():
            model(ids, attention_mask=mask, **{CACHE: cache})
    finally:
        sys.setprofile(None)
    assert cache.report().total.entries_evicted and 3 <= max(map(len, found)) <= 6


@torch.no_grad()
@pytest.mark.parametrize("there", [False, True], ids=["plain", "C++"])
@pytest.mark.parametrize("policy", ["snapkv", "layer_defensivekv", "merge"])
def test_a_step_asks_for_no_number_of_a_tensor(monkeypatch: Any, policy: str, there: bool) -> None:
    """Tensors without data give no number, but an exception."""
    monkeypatch.setattr(build, "is_there", lambda: there and build.load())
    model, (ids, mask) = attached("llama"), tiny_batch((0, 3), 60)
    cache = cache_of(model, policy).prefill(ids, mask)
    for _ in range(3):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        where = positions_of(mask)[:, -1:]
        step(cache, model, mask)
    mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = {"attention_mask": mode.from_tensor(mask), "position_ids": mode.from_tensor(where + 1)}
        out = model(torch.full((2, 1), 5), **given, **{CACHE: cache})
    assert out.logits.shape == (2, 1, model.config.vocab_size)


def test_two_frames_a_layer_stand_before_a_cache_of_transformers() -> None:
    model, (ids, mask) = attached("llama"), tiny_batch((0,), 60)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    frames = Frames().of(cache, model, torch.cat([mask, mask.new_ones(1, 1)], 1))
    layers = model.config.num_hidden_layers
    each = {name for name, count in frames.calls.items() if name != "<genexpr>" and count >= layers > 1}
    assert {"_before_attention", "retain_attention", "dense"} <= each
    assert each <= {"_before_attention", "retain_attention", "dense", "cache_in", "_name_cache"}  # a model's


@pytest.mark.parametrize("there", [False, True], ids=["plain", "C++"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_quick_steps_are_those_that_gradients_are_asked_of(
    monkeypatch: Any, family: str, there: bool
) -> None:
    """Where gradients are on, each layer appends and attends as a chunk does."""
    monkeypatch.setattr(build, "is_there", lambda: there and build.load())
    model, (ids, mask) = tiny_model(family), tiny_batch((0, 9), 60)
    with retain.attach(model):
        quick, slow = (Cache(model, "snapkv", keep_ratio=0.4, short="keep") for _ in range(2))
        for cache in (quick, slow):
            cache.prefill(ids, mask)
        for _ in range(70):  # through a growth of the stores
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
            given = {"input_ids": torch.full_like(mask[:, -1:], 5), "attention_mask": mask}
            where = positions_of(mask)[:, -1:]
            want = model(**given, position_ids=where, **{CACHE: slow}).logits
            assert_close(step(quick, model, mask), want.detach(), ops=MODEL)
        for a, b in zip(quick.state.stores, slow.state.stores, strict=True):
            assert torch.equal(a.positions_C[a.index_N()], b.positions_C[b.index_N()])
