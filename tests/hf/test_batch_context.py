"""What is passed to a cache by hand is refused by name, before anything is read or allocated for it.

Users run without the shape checks of this test suite, so these calls go around them (`inspect.unwrap`).
"""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import retain
from retain.gates import build_gates, dims_for
from retain.hf.cache import batch_context as given
from retain.hf.cache.cache import Cache
from retain.hf.model.decoder import describe
from retain.hf.version_names import CACHE
from tests.refused import refused
from tests.tiny import VOCAB, tiny_batch, tiny_model


@torch.no_grad()
def prefill(cache: Cache, *args: Any, **how: Any) -> Cache:
    return inspect.unwrap(Cache.prefill)(cache, *args, **how)


def empty_cache(**how: Any) -> Cache:
    return Cache(tiny_model("llama"), how.pop("policy", "snapkv"), keep_ratio=0.5, **how)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("slack", value) for value in (-1, 2.5, "8", True, given.MOST_SLACK + 1)),
        *(("seeds", value) for value in ([1.5], 7, "12", [None], torch.ones(2, 2), [True, 0.0])),
    ],
)
def test_slack_and_seeds_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^{name} is .*: pass "):
        inspect.unwrap(Cache.__init__)(object.__new__(Cache), tiny_model("llama"), None, **{name: value})
    if name == "slack":
        refused(r"^slack is ", inspect.unwrap(Cache.concat.__func__), Cache, [empty_cache()], slack=value)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    assert given.seeds_from(np.array([3, 4])) == given.seeds_from(torch.tensor([3, 4])) == [3, 4]
    assert given.slack_from(np.int64(5)) == 5 and given.seeds_from(None) is None


NO_PROMPTS = [
    ([[1, 2, 3]], r"is a list: pass token ids \[B, T\]"),
    (torch.tensor([1, 2, 3]), r"are of shape \(3,\).*of one prompt: input_ids\[None\]"),
    (torch.zeros(0, 4, dtype=torch.int64), r"are of shape \(0, 4\), so there is nothing to read"),
    (torch.ones(1, 3), "are torch.float32: pass token ids"),
    (torch.tensor([[1, VOCAB]]), rf"go from 1 to {VOCAB}, and the model knows tokens 0 to {VOCAB - 1}"),
    (torch.tensor([[-100, 1]]), "go from -100 to 1"),
]


@pytest.mark.parametrize(("ids", "said"), NO_PROMPTS)
def test_what_is_no_prompt_is_not_read(ids: Any, said: str) -> None:
    cache = empty_cache()
    with retain.attach(cache.model), pytest.raises(ValueError, match=f"^input_ids {said}"):
        prefill(cache, ids)
    assert cache.num_seen == 0


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.ones(3, 40), r"attention_mask is \(3, 40\), and input_ids are \(1, 40\)"),
        ([[1] * 40], r"attention_mask is list"),
        (torch.full((1, 40), torch.nan), r"attention_mask holds other values than 1 and 0"),
        (torch.full((1, 40), 2), r"attention_mask holds other values than 1 and 0"),
    ],
)
def test_what_is_no_mask_is_not_read(mask: Any, said: str) -> None:
    cache = empty_cache()
    ids, _ = tiny_batch((0,), 40)
    with retain.attach(cache.model), pytest.raises(ValueError, match=f"^{said}"):
        prefill(cache, ids, mask)
    assert cache.num_seen == 0


@pytest.mark.parametrize("chunk_size", [2.5, 0, -3, "8", True])
def test_a_chunk_is_a_number_of_tokens(chunk_size: Any) -> None:
    cache = empty_cache()
    ids, mask = tiny_batch((0,), 40)
    with retain.attach(cache.model), pytest.raises(ValueError, match="^chunk_size is .*tokens a forward"):
        prefill(cache, ids, mask, chunk_size=chunk_size)
    assert cache.num_seen == 0


def test_gates_that_no_score_would_read_are_refused() -> None:
    model = tiny_model("llama")
    sizes = {spec.layer_idx: spec.sizes for spec in describe(model)}
    gates = build_gates("linear", dims_for("linear", sizes, {}))
    for policy in ("snapkv", "full"):
        with pytest.raises(ValueError, match=rf"gates would not be read: policy '{policy}' takes none"):
            empty_cache(policy=policy, gates=gates)
    assert empty_cache(policy="gate", gates=gates).num_seen == 0


def test_a_forward_refuses_a_mask_of_other_values() -> None:
    """The same of `generate` and of a plain forward, whose mask reaches the cache as it is."""
    cache = empty_cache()
    ids, mask = tiny_batch((0,), 40)
    with retain.attach(cache.model), pytest.raises(ValueError, match="^attention_mask holds other values"):
        cache.model(input_ids=ids, attention_mask=mask.float() * torch.nan, **{CACHE: cache})
