"""A conversation may go to and fro between `torch.inference_mode` and `torch.no_grad`: `generate` runs under
the latter, and whoever had the context read may have been under the former. Under which of them a step runs
changes nothing, bit for bit.
"""

from contextlib import nullcontext

import pytest
import torch

from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from tests.tiny import PAD, attached, tiny_batch

TOKENS, TURN, NEW = 40, 5, 8
# Running statistics, and norms in side columns.
POLICIES = {"h2o": {}, "criticalkv": {"observed_settings": {"window": 4}}}
PROTECTION = {"recent": 4, "sinks": 1, "minimum": 0, "prefix_fraction": 0, "suffix_fraction": 0}
MODES = {"i": torch.inference_mode, "n": torch.no_grad, "-": nullcontext}
# Under which mode each step of `conversation` runs.
ORDERS = ("innn", "niii", "in-i")


def cache_of(model, name: str) -> Cache:
    asked = {"when": "chunk+decode", "every": 3, "tokens_per_head": 12, "protection": PROTECTION}
    return Cache(model, name, **asked, **POLICIES[name])


def generated(model, cache, ids, mask):
    """`generate` runs under no_grad where it does not run under inference mode."""
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        **{CACHE: cache},
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=PAD,
    )
    return out.sequences, torch.stack(out.logits)


def conversation(model, cache, order: str) -> tuple[list, Cache]:
    """A context; other sequences; an answer, a turn, an answer."""
    ids, mask = tiny_batch((0, 3, 11), TOKENS + 2 * TURN)
    modes = iter(order)
    with MODES[next(modes)]():
        cache.prefill(ids[:, :TOKENS], mask[:, :TOKENS], chunk_size=16)
    with MODES[next(modes)]():
        chosen = torch.tensor([2, 0, 0, 1])
        fork = cache.fork()
        fork.batch_select_indices(chosen)
        ids, mask = ids[chosen], mask[chosen]
    with MODES[next(modes)]():
        stop = TOKENS + TURN
        answer, logits = generated(model, fork, ids[:, :stop], mask[:, :stop])
    with MODES[next(modes)]():
        ids = torch.cat([answer, ids[:, stop:]], dim=1)
        mask = torch.cat([mask[:, :stop], mask.new_ones(4, NEW + TURN)], dim=1)
        second, more = generated(model, fork, ids, mask)
    return [answer, logits, second, more], fork


def assert_nothing_frozen(cache) -> None:
    """Tensors that the cache changes in place can be changed under any mode."""
    for layer in cache.state.ragged:
        store = layer.store
        columns = (store.keys_CD, store.values_CD, store.positions_C, *store.side.values())
        assert not any(x.is_inference() for x in (*columns, store.offsets_R1, store.lengths_R))


@pytest.mark.parametrize("name", POLICIES)
def test_every_order_of_modes_is_one_conversation(name):
    model = attached()
    want, same = conversation(model, cache_of(model, name), "nnnn")
    assert same.evictions > 5
    for order in ORDERS:
        got, cache = conversation(model, cache_of(model, name), order)
        assert all(map(torch.equal, got, want))
        assert_nothing_frozen(cache)
        assert cache.evictions == same.evictions and cache.entries_held == same.entries_held
