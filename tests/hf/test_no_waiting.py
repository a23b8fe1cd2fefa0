"""Decoding steps ask nothing of the device: neither numbers nor sizes that depend on them.

On a CPU nothing waits, so what would is looked for: operators whose result's size or value the host must
know, methods that bring a tensor to the host, and tensors made of Python numbers, called from the project's
own code, while kernels run (in Triton's interpreter where there is no GPU; what the interpreter looks at is
its own business, as is what transformers asks of its masks). Exempt is `MaskCheck.settle` alone, which reads
answers that have arrived.

What this does not show: a copy between host and device by `.to` or `copy_`, which on a CPU is none, and what
a CUDA library does by itself. Those are seen by PyTorch's own alarm, in the test that needs a GPU.
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
from retain.hf.intercept import forward_call
from retain.hf.version_names import CACHE
from retain.kernels import backend
from tests.evictions import EVICTING, small
from tests.hf.masked import positions_of
from tests.hf.regime_runs import gates_of
from tests.hf.test_saving import forward, grown
from tests.refused import refused
from tests.tiny import attached, tiny_batch, tiny_model

ROOT = Path(__file__).resolve().parents[2]
OURS = (ROOT / "retain", ROOT / "kernels")
# The one function that reads what came: answers that were sent for, and have arrived.
ARRIVED = (Path(forward_call.__file__), forward_call.MaskCheck.settle.__name__)
SIZES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal")
VALUES = ("_local_scalar_dense", "item", "is_nonzero")
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
MAKES = ("tensor", "as_tensor")  # of Python numbers: a copy that is waited for
INDEXED = ("index", "index_put", "index_put_")


def waits(func, args) -> bool:
    """Whether an operator's result has a size or a value that only the device knows."""
    name = func.name().removeprefix("aten::").partition(".")[0]
    if name in INDEXED:
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    if name == "repeat_interleave":
        return func._overloadname == "Tensor" or isinstance(args[1], Tensor)
    return name in (*SIZES, *VALUES)


class Watch(TorchDispatchMode):
    """Where the project's own code would have waited inside, by place and what it called."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()
        self.reads = Reads(self)

    def note(self, name: str) -> None:
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            if "triton" in path.parts or "transformers" in path.parts or (path, frame.name) == ARRIVED:
                return
            if any(path.is_relative_to(folder) for folder in OURS):
                self.found[f"{path.relative_to(ROOT)}:{frame.lineno} {name}"] += 1
                return

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if waits(func, args):
            self.note(func.name())
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        super().__exit__(*exc)
        return self.reads.__exit__(*exc)


class Reads(TorchFunctionMode):
    """Methods that bring a tensor to the host, and functions that make one of numbers there."""

    def __init__(self, watch: Watch):
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS or (name in MAKES and not isinstance(args[0], Tensor)):
            self.watch.note(name)
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
        evictions, pages = cache.evictions, [store.plain.pages for store in cache.state.stores]
        with backend.using("triton"), Watch() as watch:
            next_B1 = model(input_ids=next_B1, **{CACHE: cache}, **given).logits.argmax(-1)
        grown = any(
            own is not store.plain.pages for own, store in zip(pages, cache.state.stores, strict=True)
        )
        kind = (
            "first"
            if not number
            else "evicts"
            if cache.evictions > evictions
            else "grows"
            if grown
            else "step"
        )
        found.append((kind, watch.found))
    return found


def cache_of(model, name, heads_file, **settings) -> Cache:
    policy = small(name, heads_file)
    gates = gates_of(model) if policy.learned else None
    return Cache(model, policy, gates=gates, seeds=(3, 4), tokens_per_head=12, **settings)


@torch.no_grad()
@pytest.mark.parametrize("regime", ["prefill", "prefill+decode"])
@pytest.mark.parametrize("name", ["fused", "defensivekv", "lava"])
def test_a_step_waits_for_nothing(name, regime, heads_file):
    model = attached("qwen3")
    found = steps(model, cache_of(model, name, heads_file, regime=regime, every=4, slack=3), 9)
    kinds = Counter(kind for kind, _ in found)
    assert kinds["step"] >= 4 and bool(kinds["evicts"]) == (regime != "prefill")
    assert [(kind, places) for kind, places in found if kind == "step" and places] == []
    # The control: the watch sees waits where there are some, once for many steps.
    assert all(places for kind, places in found if kind != "step")


@torch.no_grad()
@pytest.mark.parametrize("name", EVICTING)
def test_no_policy_waits(name, heads_file):
    model = attached("qwen2")
    found = steps(model, cache_of(model, name, heads_file), 3)
    assert [kind for kind, _ in found] == ["first", "step", "step"]
    assert not found[1][1] + found[2][1]


@torch.no_grad()
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_next", "mistral_window"])
@pytest.mark.parametrize("mask_given", [True, False], ids=["mask", "no mask"])
def test_no_family_waits(family, mask_given, heads_file):
    """Windows, soft caps, sinks, and layers that are left to transformers."""
    model = attached(family)
    cache = Cache(model, small("snapkv", heads_file), keep_ratio=0.5)
    found = steps(model, cache, 4, mask_given=mask_given, pads=(0, 0) if not mask_given else (0, 3))
    assert [places for kind, places in found if kind == "step" and places] == []
    assert len(found) == 4


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("qwen3", lambda mask: mask.index_fill(1, torch.tensor([20]), 0), "declared tokens padding that the"),
        ("qwen3", lambda mask: torch.ones_like(mask), "shows tokens as real that were padding"),
        ("qwen3", None, "position_ids do not go on after the positions"),
        # Layers that are left to transformers take a masked token for one.
        ("gemma3", lambda mask: without_last(mask, 1), "has padding after tokens that its sequences have"),
    ],
    ids=["forgotten", "revived", "back", "gap"],
)
def test_what_is_wrong_with_a_step_is_noticed_after_it(family, change, text, heads_file):
    model, (ids, mask) = attached(family), tiny_batch((0, 3))
    where, wrong = positions_of(mask), {}

    def step(more):
        given = {"attention_mask": mask, "position_ids": where[:, -1:] + more, CACHE: cache}
        model(input_ids=ids[:, -1:], **{**given, **wrong})

    with backend.using("triton"):
        cache = cache_of(model, "snapkv", heads_file)
        forward(model, cache, ids, mask)
        for more in (1, 2, 3):
            mask = grown(mask, 1)
            if more == 3 and change:  # the mask that was right before is no more
                mask = change(mask)
            elif more == 3:
                wrong = {"position_ids": where[:, -1:] + 2}
            step(more)
        mask, wrong = grown(mask, 1), {}
        refused(f"a decoding step.*{text}.*noticed only after.*reset", step, 4)
        refused("an earlier forward or change broke off", step, 4)
        cache.reset()
        assert not cache.state.mask_checks


class Late(forward_call.MaskCheck):
    """Answers of a device that is far behind."""

    arrived = property(lambda self: False)


@torch.no_grad()
@pytest.mark.parametrize("look", ["fork", "crop", "read", "generate", "report", "budgets"])
def test_answers_that_are_late_are_waited_for_where_it_matters(monkeypatch, look, heads_file):
    """A device that is far behind: steps go on, and whoever changes what is held, or reads on, waits."""
    model, (ids, mask), waited = attached("qwen3"), tiny_batch((0, 3)), []

    class Waiting(Late):
        def settle(self):
            waited.append(self)
            super().settle()

    monkeypatch.setattr(forward_call, "MaskCheck", Waiting)
    with backend.using("triton"):
        cache = cache_of(model, "snapkv", heads_file)
        if look == "generate":
            how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
            model.generate(ids, attention_mask=mask, **{CACHE: cache}, **how)
            # Two of its six tokens came of the prompt and of the first step.
            assert len(waited) == 4 and not cache.state.mask_checks
            return
        _, mask = decoded(model, cache, 0, steps=4)
        assert len(cache.state.mask_checks) == 3 and not waited
        if look == "fork":
            assert cache.fork().state.mask_checks is not cache.state.mask_checks
        elif look == "crop":
            cache.crop(-1)
        elif look in ("report", "budgets"):
            getattr(cache, look)()
        else:
            forward(model, cache, ids[:, :2], grown(mask, 2))
        assert len(waited) == 3 and not cache.state.mask_checks


def decoded(model, cache, wrong: int, *, forgets: int = 20, steps: int = 6) -> tuple[int, Tensor]:
    """Decode by hand with a mask that takes back the tokens of the first sequence from `forgets` on, at one
    step (0: none); and return the steps that went, and the last right mask."""
    ids, mask = tiny_batch((0, 3))
    where = positions_of(mask)
    forward(model, cache, ids, mask)
    for number in range(1, steps + 1):
        mask = grown(mask, 1)
        given = mask.clone()
        if number == wrong:
            given[0, forgets:-1] = 0
        step = {"attention_mask": given, "position_ids": where[:, -1:] + number}
        model(input_ids=ids[:, :1], **{CACHE: cache}, **step)
        if number == wrong:
            return number, mask
    return steps, mask


def without_last(mask, row):
    mask = mask.clone()
    mask[row, -1] = 0
    return mask


FORGOTTEN = "a decoding step's attention_mask declared tokens padding that the cache had seen"


@torch.no_grad()
@pytest.mark.parametrize("wrong", [4, 8])
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_no_eviction_goes_by_a_mask_that_nobody_looked_at(monkeypatch, name, wrong, heads_file):
    """A step that forgets a row's last tokens, at which entries are due to go; the device is far behind."""
    monkeypatch.setattr(forward_call, "MaskCheck", Late)
    model = attached("qwen3")
    with backend.using("triton"):
        cache = cache_of(model, name, heads_file, regime="prefill+decode", every=4)
        refused(f"{FORGOTTEN}.*reset", decoded, model, cache, wrong, forgets=36, steps=9)
        assert cache.num_seen == 40 + wrong
        refused("an earlier forward or change broke off", cache.fork)
        cache.reset()
        assert decoded(model, cache, 0, steps=9)[0] == 9


@torch.no_grad()
def test_what_layers_note_between_evictions_waits_for_the_mask_too(monkeypatch, heads_file):
    monkeypatch.setattr(engine, "MOST_UNNOTED", 3)
    model = attached("qwen3")
    with backend.using("triton"):
        cache = cache_of(model, "h2o", heads_file, regime="prefill+decode", every=32)
        refused(f"{FORGOTTEN}.*reset", decoded, model, cache, 3)


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


@torch.no_grad()
@pytest.mark.parametrize("path", ["triton", "reference"])
def test_which_steps_may_take_tokens_back_is_the_same_everywhere(path, heads_file):
    """The first step after a read may, and entries go; a later one may not, be it waited for or not."""
    model = attached("qwen3")
    with backend.using(path):
        cache = cache_of(model, "snapkv", heads_file)
        decoded(model, cache, 1)
        held_BLH = cache.budgets().held_BLH
        assert int(held_BLH[0].sum()) < int(held_BLH[1].sum())
        cache.reset()
        with pytest.raises(ValueError, match=FORGOTTEN):
            decoded(model, cache, 2)
            cache.report()
        # Where it was looked at before it ran, nothing has changed.
        assert cache.state.broken == (path == "triton")
        assert cache.num_seen == (42 if path == "triton" else 41)
