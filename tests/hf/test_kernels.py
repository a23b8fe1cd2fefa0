"""Generation with every op on its kernel keeps what the plain path keeps, entry by entry, and writes what it
writes: in Triton's interpreter here, and on the device where there is one (marked `gpu`).

Scores of the two paths differ by rounding: where a decision hangs on that, take another seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import retain
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.kernels import backend
from retain.presets import Policy
from tests.evictions import small
from tests.hf.regime_runs import gates_of, held_by
from tests.tiny import tiny_batch, tiny_model

PADS, TOKENS, NEW, EVERY = (0, 7), 45, 9, 4
# name -> what is changed of the preset, so that all stages are on.
POLICIES = {"learned": {"scope": "model"}, "defensivekv": {}, "layer_defensivekv": {}, "lava": {}}
# All their statistics of attention are of pooled windows, which are plain PyTorch.
POOLED = ("defensivekv", "layer_defensivekv", "snapkv", "adakv", "criticalkv")
# Evicting while decoding goes through all that a prefill's eviction does; sinks and sliding windows.
MATRIX = [
    *((name, "llama", "prefill") for name in POLICIES),
    *((name, "qwen3", "prefill+decode") for name in POLICIES),
    *((name, "gpt_oss", "prefill+decode") for name in ("learned", "lava")),
]
ON_A_GPU = [(name, "llama", "prefill+decode") for name in ("snapkv", "adakv", "criticalkv")]


@contextmanager
def watched() -> Iterator[set[str]]:
    """Inside, names of the ops that took their kernels."""
    names: set[str] = set()
    path_for = backend.path_for

    def watch(op: str, *args: Any, **kwargs: Any) -> backend.Path:
        path = path_for(op, *args, **kwargs)
        names.update([op] if path == "triton" else [])
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "path_for", watch)
        yield names


@torch.no_grad()
def generated(model: Any, policy: Policy, when: str) -> tuple[Tensor, list[Tensor]]:
    """The tokens, and which tokens each layer holds in the end, `[B, H, T]`."""
    ids, mask = (part.to(model.device) for part in tiny_batch(PADS, TOKENS))
    gates = gates_of(model) if policy.learned else None
    with retain.attach(model):
        cache = Cache(model, policy, gates=gates, when=when, every=EVERY, keep_ratio=0.4)
        given = {"input_ids": ids, "attention_mask": mask, CACHE: cache}
        tokens = model.generate(**given, max_new_tokens=NEW, do_sample=False, disable_compile=True)
        seen = torch.cat([mask, mask.new_ones(len(mask), NEW - 1)], dim=1).cpu()
        return tokens, held_by(cache, seen)


def agree(model: Any, policy: Policy, when: str, kernels: str | None) -> None:
    """Kernels, forced or by themselves, keep what the plain path keeps and write what it writes."""
    with backend.using("reference"):
        tokens, held = generated(model, policy, when)
    with watched() as ops, backend.using(kernels) if kernels else nullcontext():
        fast = generated(model, policy, when)
    assert ops == {"ragged_attention"} | (set() if policy.name in POOLED else {"attention_stats"})
    assert torch.equal(fast[0], tokens)
    assert all(torch.equal(one, two) for one, two in zip(fast[1], held, strict=True))
    # Something was at stake: entries were evicted, and heads keep different ones.
    assert sum(int(layer.sum()) for layer in held) < 0.6 * sum(layer.numel() for layer in held)
    assert all(bool((layer != layer[:, :1]).any()) for layer in held)


def case(name: str, heads_file: str) -> Policy:
    return replace(small(name, heads_file), **POLICIES.get(name, {}))


@pytest.mark.parametrize(("name", "family", "when"), MATRIX)
def test_kernels_keep_what_the_plain_path_keeps(name, family, when, heads_file):
    agree(tiny_model(family), case(name, heads_file), when, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "family", "when"), [*MATRIX, *ON_A_GPU])
def test_kernels_keep_what_the_plain_path_keeps_on_a_gpu(name, family, when, heads_file):
    """As a user runs it: nothing is forced, and CUDA takes its kernels."""
    agree(tiny_model(family).cuda(), case(name, heads_file), when, None)
