import math

import pytest
import torch

from retain.cache.attend import attend
from retain.cache.equal_rows import step_rows_of
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.kernels.decode_step import build
from retain.kernels.ragged_attention import reference
from retain.kernels.ragged_attention.pages import PAGE
from tests.close import assert_close

# name -> (B, H, G, S, D, kept lengths per row); covers an empty row, one entry, odd lengths, several pages,
# whole pages, G = 1 and 8, wide heads, queries by pages and row by row.
CASES = {
    "decode": (2, 2, 2, 1, 16, (7, 8, 8, 7)),
    "chunk": (2, 2, 2, 5, 16, (7, 8, 8, 7)),
    "many queries": (2, 2, 2, 40, 16, (7, 80, 8, 130)),
    "very unequal": (2, 3, 2, 1, 8, (300, 3, 1, 17, 64, 128)),
    "an empty row": (1, 3, 2, 3, 8, (0, 5, 9)),
    "all rows empty": (2, 1, 2, 3, 8, (0, 0)),
    "one entry": (1, 2, 2, 1, 8, (1, 1)),
    "group of 1": (3, 1, 1, 2, 64, (5, 33, 71)),
    "group of 8": (1, 2, 8, 4, 128, (13, 19)),
    "wide heads": (1, 2, 2, 1, 256, (6, 140)),
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
    new_keys, new_values, queries = draw(B, H, S, D), draw(B, H, S, D), draw(B, S, H * G, D).transpose(1, 2)
    valid = torch.arange(S) >= torch.arange(B)[:, None] % S
    return queries, keys, values, keep, new_keys, new_values, valid


def dense(
    queries, keys, values, keep, new_keys, new_values, valid, scaling, soft_cap=None, sinks=None,
    weights=None,
):  # fmt: skip
    """Full attention with -inf on evicted entries, in the inputs' precision."""
    (B, Q, S, _), H, T = queries.shape, keys.shape[1], keys.shape[2]
    keys, values = torch.cat([keys, new_keys], 2), torch.cat([values, new_values], 2)
    causal = torch.ones(S, S, dtype=torch.bool).tril() & valid[:, None, :]
    visible = torch.cat([keep[:, :, None].expand(-1, -1, S, -1), causal[:, None].expand(-1, H, -1, -1)], -1)

    def repeat(x):
        return x.repeat_interleave(Q // H, 1)

    logits = queries @ repeat(keys).transpose(-1, -2) * scaling
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if weights is not None:
        logits[..., :T] += repeat(weights.log().to(logits))[:, :, None]
    logits = logits.masked_fill(~repeat(visible), -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits)[:, None, None].expand(B, -1, S, 1)], -1)
    probs = torch.softmax(logits, -1).nan_to_num(0.0)[..., : T + S]
    return (probs @ repeat(values)).masked_fill(~valid[:, None, :, None], 0.0)


def filled(keys, values, keep, new_keys, new_values, valid, slack=2):
    """A store of the kept entries with the new tokens appended, and what those see."""
    B, T = keys.shape[0], keys.shape[2]
    store = RaggedStore.from_dense(keys, values, torch.arange(T).expand(B, T), keep, slack)
    return store, appended(store, new_keys, new_values, valid, T)


def appended(store, new_keys, new_values, valid, T):
    B, S = valid.shape
    padded = None if bool(valid.all()) else valid
    return store.append_(new_keys, new_values, torch.arange(T, T + S).expand(B, S), padded)


def query(store, seen, queries, *, scaling=0.3, soft_cap=None, sinks=None, runs=False):
    """Attention of queries; by dense calls only with `runs`."""
    given = {"soft_cap": soft_cap, "sinks_Q": sinks}
    if runs:
        return attend(store, queries, seen, scaling=scaling, **given)
    return attend(store, queries, seen, scaling=scaling, with_lse=True, **given)[0]  # no dense call has it


def ragged(queries, *inputs, weights=None, **options):
    keys, values, keep = inputs[:3]
    store, seen = filled(*inputs)
    if weights is not None:
        T = keys.shape[2]
        extra = {LOG_WEIGHT: weights.float().log()}
        store = RaggedStore.from_dense(keys, values, torch.arange(T).expand(len(keys), T), keep, 2, extra)
        seen = appended(store, *inputs[3:], T)
    return query(store, seen, queries, **options)


def sinks_of(case):
    B, H, G, *_ = CASES[case]
    return torch.linspace(-3.0, 3.0, H * G)


# The op's two ways, by the number of queries up to which pages go as one batch; and dense calls, which take
# no options.
OPTIONS = {"soft_cap": 5.0, "sinks": True}
WAYS = {
    "by rows": (0, False, {}),
    "by rows, all options": (0, False, OPTIONS),
    "by pages": (10**6, False, {}),
    "by pages, all options": (10**6, False, OPTIONS),
    "dense calls": (0, True, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counted", [False, True], ids=["", "log weights"])
def test_ragged_equals_masked_dense(monkeypatch, case, dtype, way, counted):
    few, runs, options = WAYS[way]
    monkeypatch.setattr(reference, "FEW", few)
    queries, *inputs = make(case, dtype)
    options = {**options, "sinks": sinks_of(case) if "sinks" in options else None}
    scaling, draw = CASES[case][4] ** -0.5, torch.Generator().manual_seed(2)
    options["weights"] = torch.randint(1, 40, inputs[2].shape, generator=draw).double() if counted else None
    wide = [x.double() if x.is_floating_point() else x for x in (queries, *inputs)]
    exact, plain = (dense(*each, scaling, **options) for each in (wide, (queries, *inputs)))
    actual = ragged(queries, *inputs, scaling=scaling, **options, runs=runs)
    assert actual.dtype == dtype
    # The column of log weights itself is float32.
    assert_close(actual, exact, plain, dtype=torch.float32 if counted and dtype == torch.float64 else None)


@pytest.mark.parametrize("few", [0, 10**6], ids=["by rows", "by pages"])
@pytest.mark.parametrize("case", CASES)
def test_unwritten_room_does_not_matter(monkeypatch, case, few):
    monkeypatch.setattr(reference, "FEW", few)
    queries, *inputs = make(case)
    store, seen = filled(*inputs)
    clean = query(store, seen, queries)
    unwritten = torch.ones(len(store.keys_CD), dtype=torch.bool)
    unwritten[store.index_N()] = False
    assert unwritten.any()
    store.keys_CD[unwritten] = math.nan
    store.positions_C[unwritten] = 2**31 - 1 - PAGE
    store.values_CD[unwritten] = 1e30  # finite, as a free slot's values must be
    assert torch.equal(query(store, seen, queries), clean)


@pytest.mark.parametrize("lengths", [(9, 9, 9, 9), (9, 8, 9, 7), (9, 9, 200, 3), (0, 5, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("there", [False, True], ids=["plain", "C++"])
def test_steps_in_one_call_equal_the_op(monkeypatch, lengths, dtype, counted, there):
    """Steps of decoding that build on one another, in place, then an eviction, and steps behind it."""
    monkeypatch.setattr(build, "is_there", lambda: there and build.load())
    B, H, G, D, T = 2, 2, 3, 16, max(lengths) + 1
    draw = torch.Generator().manual_seed(0)
    keep = (torch.arange(T) < torch.tensor(lengths)[:, None]).view(B, H, T)
    dense = torch.randn(2, B, H, T, D, generator=draw).to(dtype)
    extra = {LOG_WEIGHT: torch.randint(1, 9, (B, H, T), generator=draw).float().log()} if counted else None
    store = RaggedStore.from_dense(*dense, torch.arange(T).expand(B, T), keep, slack=3, side=extra)
    other = store.fork()
    for step in range(90):  # through a growth of the store
        if store.free < 1:
            store.make_room_(1)
        if store.step_rows is None:
            how = {"scaling": 0.3, "soft_cap": None, "sinks": False}
            store.step_rows = step_rows_of(store, **how)
        keys, values = torch.randn(2, B, H, 1, D, generator=draw).to(dtype)
        queries = torch.randn(B, H * G, 1, D, generator=draw).to(dtype)
        rows, last_B = store.step_rows, torch.full((B,), T + step)
        rows.last_B, rows.positions_R = last_B, last_B.repeat_interleave(H).int()
        got, _ = rows.attend(queries, keys, values, None, {})
        store.free -= 1
        seen = other.append_(keys, values, last_B[:, None])
        want = query(other, seen.long(), queries)
        assert_close(got.transpose(1, 2), want.float(), want)
        assert all(map(torch.equal, store.flat(), other.flat()))
        if step == 40:
            keep_N = torch.rand(store.entries_held, generator=draw) < 0.7
            for each in (store, other):
                each.compact_(keep_N)
            assert store.step_rows is None  # rows may have become unequal
