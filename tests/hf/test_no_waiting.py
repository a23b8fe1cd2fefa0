"""Decoding steps ask nothing of the device: neither numbers nor sizes that depend on them.

On a CPU nothing waits, so what would is looked for while kernels run (in Triton's interpreter where there is
no GPU): operators of which PyTorch says that the host must know a value, and methods that bring a tensor to
the host, called from the project's own code. Copies between host and device, and what a CUDA library does by
itself, are seen by PyTorch's own alarm, in the test that needs a GPU.
"""

import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import retain
from retain.hf.cache import engine
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.kernels import backend
from tests.evictions import small
from tests.hf.masked import positions_of
from tests.hf.regime_runs import gates_of
from tests.tiny import attached, tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[2]
OURS = (ROOT / "retain", ROOT / "kernels")
TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Watch(TorchDispatchMode):
    """Where the project's own code would have waited inside, by place and what it called."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.reads = Reads(self)

    def note(self, name: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if "triton" in path.parts or "transformers" in path.parts:
                return
            if any(path.is_relative_to(folder) for folder in OURS):
                self.found[f"{path.relative_to(ROOT)}:{frame.lineno} {name}"] += 1
                return

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        waits = bool(TAGS & {*func.tags}) or name == "lift_fresh"  # of Python numbers: a copy
        if name in ("index", "index_put", "index_put_"):
            waits = any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
        if waits:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        return self.reads.__exit__(*exc)


class Reads(TorchFunctionMode):
    """Methods that bring a tensor to the host."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu"):
            self.watch.note(func.__name__)
        return func(*args, **(kwargs or {}))


def steps(
    model, cache, num_tokens: int, *, mask_given: bool = True, pads=(0, 3)
) -> list[tuple[str, Counter]]:
    """Decode by hand; of each step what it was, and where it would have waited."""
    ids, mask = tiny_batch(pads)
    given = {"attention_mask": mask, "position_ids": positions_of(mask)}
    next_B1 = model(input_ids=ids, **{CACHE: cache}, **given).logits[:, -1:].argmax(-1)
    found, where = [], positions_of(mask)[:, -1:]
    for number in range(num_tokens):
        mask, where = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1), where + 1
        given = {"position_ids": where} | ({"attention_mask": mask} if mask_given else {})
        before = cache.evictions, [id(store.pages) for store in cache.state.stores]
        with backend.using("triton"), Watch() as watch:
            next_B1 = model(input_ids=next_B1, **{CACHE: cache}, **given).logits.argmax(-1)
        changed = before != (cache.evictions, [id(store.pages) for store in cache.state.stores])
        found.append(("first" if not number else "evicts or grows" if changed else "step", watch.found))
    return found


def cache_of(model, name, heads_file, **settings) -> Cache:
    policy = small(name, heads_file)
    gates = gates_of(model) if policy.learned else None
    return Cache(model, policy, gates=gates, seeds=(3, 4), tokens_per_head=12, **settings)


@torch.no_grad()
@pytest.mark.parametrize("when", ["prefill", "prefill+decode"])
@pytest.mark.parametrize("name", ["learned", "defensivekv", "lava"])
def test_a_step_waits_for_nothing(name, when, heads_file):
    model = attached("qwen3")
    found = steps(model, cache_of(model, name, heads_file, when=when, every=4), 9)
    kinds = Counter(kind for kind, _ in found)
    assert kinds["step"] >= 4 and bool(kinds["evicts or grows"]) == (when != "prefill")
    assert [(kind, places) for kind, places in found if kind == "step" and places] == []
    # The control: the watch sees waits where there are some, once for many steps.
    assert all(places for kind, places in found if kind != "step")


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("mask_given", [True, False], ids=["mask", "no mask"])
def test_no_family_waits(family, mask_given, heads_file):
    """Windows, soft caps, sinks, and layers that are left to transformers."""
    model = attached(family)
    cache = Cache(model, small("snapkv", heads_file), keep_ratio=0.5)
    found = steps(model, cache, 4, mask_given=mask_given, pads=(0, 0) if not mask_given else (0, 3))
    assert [places for kind, places in found if kind == "step" and places] == []
    assert len(found) == 4


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_on_a_gpu_no_step_waits(monkeypatch, family, heads_file):
    """The cache's part of each step under PyTorch's own alarm."""
    model = tiny_model(family).cuda()
    ids, mask = (part.cuda() for part in tiny_batch((0, 3)))
    strict = [False]

    def alarmed(method):
        def run(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("error" if strict[0] else "default")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    for name in ("begin", "attention", "expect", "finish"):
        monkeypatch.setattr(engine.Engine, name, alarmed(getattr(engine.Engine, name)))
    with retain.attach(model):
        cache = Cache(model, small("snapkv", heads_file), tokens_per_head=12)
        where = positions_of(mask)
        model(input_ids=ids, attention_mask=mask, position_ids=where, **{CACHE: cache})
        for number in range(1, 8):
            strict[0] = number > 2
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            given = {"attention_mask": mask, "position_ids": where[:, -1:] + number}
            model(input_ids=ids[:, :1], **{CACHE: cache}, **given)
    assert "Triton" in cache.report().path
