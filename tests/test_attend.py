import math

import pytest
import torch

from retain.attend import Block, attend, blocks_of
from retain.cache import RaggedStore
from tests.close import assert_close

# name -> (B, H, G, S, D, kept lengths per row); covers an empty row, one entry, odd lengths, G = 1 and 8,
# wide heads.
CASES = {
    "decode": (2, 2, 2, 1, 16, (7, 8, 8, 7)),
    "chunk": (2, 2, 2, 5, 16, (7, 8, 8, 7)),
    "very unequal": (2, 3, 2, 1, 8, (100, 3, 1, 17, 60, 58)),
    "an empty row": (1, 3, 2, 3, 8, (0, 5, 9)),
    "group of 1": (3, 1, 1, 2, 64, (5, 33, 11)),
    "group of 8": (1, 2, 8, 4, 128, (13, 19)),
    "wide heads": (1, 2, 2, 1, 256, (6, 40)),
}


def make(case, dtype=torch.float32, seed=0):
    """Queries, the store of kept entries, dense keys/values and the keep mask, new tokens and their
    validity."""
    B, H, G, S, D, lengths = CASES[case]
    generator = torch.Generator().manual_seed(seed)
    T = max(lengths) + 3

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    keys, values = (
        draw(B, T, H, D).transpose(1, 2),
        draw(B, H, T, D),
    )  # keys are not contiguous, as in real models
    keep = torch.zeros(B * H, T, dtype=torch.bool)
    for row, length in enumerate(lengths):
        keep[row, torch.randperm(T, generator=generator)[:length]] = True
    keep = keep.view(B, H, T)
    new_keys, new_values, queries = draw(B, H, S, D), draw(B, H, S, D), draw(B, H * G, S, D)
    valid = torch.arange(S) >= torch.arange(B)[:, None] % S
    return queries, keys, values, keep, new_keys, new_values, valid


def dense(queries, keys, values, keep, new_keys, new_values, valid, scaling, soft_cap=None):
    """Full attention with -inf on evicted entries, in the inputs' precision."""
    S, G = queries.shape[2], queries.shape[1] // keys.shape[1]
    keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
    causal = torch.ones(S, S, dtype=torch.bool).tril() & valid[:, None, :]
    visible = torch.cat(
        [keep[:, :, None].expand(-1, -1, S, -1), causal[:, None].expand(-1, keep.shape[1], -1, -1)], -1
    )

    def repeat(x):
        return x.repeat_interleave(G, 1)

    logits = queries @ repeat(keys).transpose(-1, -2) * scaling
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    logits = logits.masked_fill(~repeat(visible), -math.inf)
    out = torch.softmax(logits, -1).nan_to_num(0.0) @ repeat(values)
    return out.masked_fill(~valid[:, None, :, None], 0.0)


def ragged(
    queries, keys, values, keep, new_keys, new_values, valid, scaling, soft_cap=None, slack=2, layout=True
):
    B, S, T = queries.shape[0], queries.shape[2], keys.shape[2]
    store = RaggedStore.from_dense(keys, values, torch.arange(T).expand(B, T), keep, slack)
    padded = None if bool(valid.all()) else valid
    seen = store.append_(new_keys, new_values, torch.arange(T, T + S).expand(B, S), padded)
    return attend(
        queries,
        store.keys_CD,
        store.values_CD,
        store.offsets_R1,
        store.lengths_R,
        seen,
        scaling=scaling,
        soft_cap=soft_cap,
        order_R=store.order_R,
        blocks=store.blocks if layout else None,
    )


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_ragged_equals_masked_dense(case, dtype, soft_cap):
    inputs = make(case, dtype)
    scaling = CASES[case][4] ** -0.5
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    reference = dense(*wide, scaling, soft_cap)
    plain = dense(*inputs, scaling, soft_cap)
    assert_close(ragged(*inputs, scaling, soft_cap), reference, plain)


@pytest.mark.parametrize("case", CASES)
def test_layout_read_from_offsets_is_the_same(case):
    inputs = make(case)
    assert torch.equal(ragged(*inputs, 0.3), ragged(*inputs, 0.3, layout=False))


def test_rows_in_pieces_are_the_same(monkeypatch):
    inputs = make("chunk")
    whole = ragged(*inputs, 0.3)
    monkeypatch.setattr("retain.attend.MAX_LOGITS", 1)
    assert_close(ragged(*inputs, 0.3), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_are_bounded_with_the_upcast_copies(monkeypatch, dtype):
    inputs = make("group of 8", dtype)  # an entry has 128 numbers to upcast, and 32 logits
    whole = ragged(*inputs, 0.3)
    pieces = []
    view = Block.view

    def remember(block, store, start=0, stop=None):
        pieces.append((stop - start) * block.longest)
        return view(block, store, start, stop)

    monkeypatch.setattr(Block, "view", remember)
    monkeypatch.setattr("retain.attend.MAX_LOGITS", 30 * 128)
    assert_close(ragged(*inputs, 0.3), whole, dtype=dtype)
    upcast = dtype != torch.float32
    assert all(entries * (128 if upcast else 32) <= 30 * 128 for entries in pieces)
    assert len(pieces) == (4 if upcast else 2)  # keys and values of each row, or of both at once


def test_a_query_that_sees_nothing_gives_zeros():
    queries, keys, values, keep, new_keys, new_values, valid = make("chunk")
    out = ragged(queries, keys, values, keep, new_keys, new_values, valid, 0.3)
    assert not valid[1, 0] and torch.equal(out[1, :, 0], torch.zeros_like(out[1, :, 0]))
    assert out.isfinite().all()


def test_blocks_of_offsets():
    blocks = blocks_of(torch.tensor([0, 4, 8, 10]), torch.tensor([3, 4, 1], dtype=torch.int32))
    assert blocks == (Block(0, 2, 0, 4, 4), Block(2, 3, 8, 2, 1))
    assert blocks[0].view(torch.arange(20.0).view(10, 2)).shape == (2, 4, 2)
