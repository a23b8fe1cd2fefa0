"""Packed stores against loops over single numbers in float64: codes, groups, rows, and every byte."""

import pytest
import torch

from retain.cache.packed_store import (
    BALANCE,
    CHANNELS,
    GROUPS,
    KEY_SCALES,
    Form,
    PackedStore,
    joined,
)
from retain.cache.store import LOG_WEIGHT
from retain.kernels.codes import Codes, decode
from retain.kernels.ragged_attention import ragged_attention
from tests.close import assert_close
from tests.refused import refused

D, V, H = 8, 6, 2
# Rows of two sequences; one is empty, one holds less than a group.
LENGTHS = [7, 0, 3, 70]

FORMS = {
    "8 bits by channel": {"bits": 8},
    "4 bits by channel": {"bits": 4},
    "2 bits by channel": {"bits": 2},
    "4 bits by token": {"bits": 4, "by": "token"},
    "2 bits by token, balanced": {"bits": 2, "by": "token", "balanced": True},
    "4 bits by channel, balanced": {"bits": 4, "balanced": True},
    "5 channels": {"bits": None, "width": 5},
    "5 channels in 4 bits": {"bits": 4, "width": 5},
    "5 channels in 2 bits by token, balanced": {"bits": 2, "by": "token", "width": 5, "balanced": True},
}
every_form = pytest.mark.parametrize("name", FORMS)


def form_of(name, dtype=torch.float32):
    wanted = {"by": "channel", "width": D, "balanced": False, **FORMS[name]}
    return Form(group=4, span=4, head_dim=D, value_dim=V, dtype=dtype, **wanted)


def numbers(lengths, seed=0):
    """Keys with one channel of outliers, and one that is constant; values; positions, row after row."""
    draw, total = torch.Generator().manual_seed(seed), sum(lengths)
    keys, values = torch.randn(total, D, generator=draw), torch.randn(total, V, generator=draw)
    keys[:, 1] *= 20
    keys[:, 2] = 0.75
    return keys, values, torch.cat([torch.arange(length) for length in lengths] or [torch.zeros(0)])


def tables_of(form, rows, seed=0):
    draw, tables = torch.Generator().manual_seed(seed), {}
    if form.width < D:
        own = [torch.randperm(D, generator=draw)[: form.width].sort().values for _ in range(rows)]
        tables[CHANNELS] = torch.stack(own).to(torch.int16)
    if form.balanced:
        tables[BALANCE] = torch.rand(rows, D, generator=draw) * 3 + 0.1
    return tables


def made(name, lengths=LENGTHS, seed=0, **beside):
    """A store, and what it was made of."""
    form = form_of(name)
    keys, values, positions = numbers(lengths, seed)
    tables = tables_of(form, len(lengths), seed)
    counts = torch.tensor(lengths)
    store = PackedStore.encoded(form, keys, values, positions, counts, H, beside=beside, rows=tables)
    return store, (keys, values, tables)


def naive_codes(xs, bits):
    """One group: what its numbers become, and its step."""
    most, least = max(xs), min(xs)
    least16 = float(torch.tensor(least, dtype=torch.float64).half())
    step16 = float(torch.tensor((most - least16) / (2**bits - 1), dtype=torch.float64).half())
    if step16 <= 0:
        return [least16] * len(xs), 0.0
    codes = [min(max(round((x - least16) / step16), 0), 2**bits - 1) for x in xs]
    return [least16 + step16 * code for code in codes], step16


def naive(form, keys, values, tables, lengths):
    """Keys and values that a store stands for, number by number; and the largest step of a key."""
    keys_out, values_out, start, steps = [], [], 0, [0.0]
    for row, length in enumerate(lengths):
        own = range(start, start + length)
        start += length
        held = tables[CHANNELS][row].tolist() if form.width < D else range(D)
        factor = tables[BALANCE][row].tolist() if form.balanced else [1.0] * D
        scaled = [[float(keys[i, c]) * factor[c] for c in held] for i in own]
        scaled = torch.tensor(scaled).float().tolist()  # balanced keys are float32 before they are codes
        if form.bits is not None and form.by == "channel":
            for first in range(0, length, form.group):
                group = scaled[first : first + form.group]
                for c in range(form.width):
                    column, step = naive_codes([entry[c] for entry in group], form.bits)
                    steps.append(step)
                    for entry, x in zip(group, column, strict=True):
                        entry[c] = x
        elif form.bits is not None:
            for entry in scaled:
                for c in range(0, form.width, form.group):
                    entry[c : c + form.group], step = naive_codes(entry[c : c + form.group], form.bits)
                    steps.append(step)
        for i, entry in zip(own, scaled, strict=True):
            whole = [0.0] * D
            for c, x in zip(held, entry, strict=True):
                whole[c] = x / factor[c]
            keys_out.append(whole)
            value = values[i].tolist()
            for c in range(0, form.value_dim, form.span) if form.bits is not None else ():
                value[c : c + form.span], _ = naive_codes(value[c : c + form.span], form.bits)
            values_out.append(value)
    return torch.tensor(keys_out), torch.tensor(values_out), max(steps)


def naive_bytes(store):
    """Bytes of what attention reads, entry by entry."""
    form, total = store.form, 0
    for length in store.lengths_R.tolist():
        for _ in range(length):
            if form.bits is None:
                total += (form.width + form.value_dim) * form.dtype.itemsize
            else:
                total += (
                    -(-form.width * form.bits // 8)
                    + -(-form.value_dim * form.bits // 8)
                    + 4 * -(-form.value_dim // form.span)
                )
                total += 4 if form.by == "channel" else 4 * -(-form.width // form.group)
            total += 4 if LOG_WEIGHT in store.beside else 0
    if form.bits is not None and form.by == "channel":
        total += len(set(store._held[GROUPS][store.index_N()].tolist())) * 2 * 2 * form.width
    rows = sum(length > 0 for length in store.lengths_R.tolist())
    total += rows * form.width * 2 if form.width < D else 0
    return total + (rows * D * 4 if form.balanced else 0)


def flat(store):
    """Decoded keys and values of every entry, and positions."""
    keys_ND, values_NV, positions_N, rows_N = store.flat()
    assert torch.equal(rows_N, store.rows_N())
    return keys_ND, values_NV, positions_N


def same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@every_form
def test_what_is_held_is_what_loops_encode(name):
    store, (keys, values, tables) = made(name)
    want_keys, want_values, step = naive(store.form, keys, values, tables, LENGTHS)
    got_keys, got_values, positions = flat(store)
    assert_close(got_keys, want_keys.double())
    assert_close(got_values, want_values.double())
    assert torch.equal(positions, numbers(LENGTHS)[2])
    assert store.lengths_R.tolist() == LENGTHS and store.entries_held == sum(LENGTHS)
    assert store.bytes_held == naive_bytes(store) <= store.bytes_allocated
    if store.form.bits is not None:
        assert step > 0 and not torch.equal(got_values, values)
        assert store.bytes_held < 4 * (D + V) * sum(LENGTHS)


@every_form
def test_attention_is_that_over_what_is_decoded(name):
    """What queries ask, over codes, is what they ask of decoded keys; an empty row gives nothing."""
    store, _ = made(name)
    queries = torch.randn(2, 2 * H, 3, D, generator=torch.Generator().manual_seed(4))
    seen_RS = store.lengths_R[:, None].expand(-1, 3).contiguous()
    where = {"scaling": 0.4, "pages": store.pages, "with_lse": True}
    given = (store.offsets_R1, store.lengths_R, seen_RS)
    got, got_lse = ragged_attention(store.asked_by(queries), store.keys, store.values, *given, **where)
    keys, values, _ = flat(store)
    for row, (keys_TD, values_TV) in enumerate(zip(keys.split(LENGTHS), values.split(LENGTHS), strict=True)):
        b, heads = row // H, slice(2 * (row % H), 2 * (row % H) + 2)
        if not len(keys_TD):
            assert not got[b, heads].any() and bool((got_lse[b, heads] == -torch.inf).all())
            continue
        logits = queries[b, heads].double() @ keys_TD.double().T * 0.4
        assert_close(got_lse[b, heads], logits.logsumexp(-1), ops=4)
        assert_close(got[b, heads], logits.softmax(-1) @ values_TV.double(), ops=4)


@pytest.mark.parametrize("how", ["filter_", "compact_"])
@every_form
def test_evictions_move_codes_and_drop_groups(name, how):
    """An entry stays what it was encoded as; a group goes with the last entry that names it."""
    score = torch.arange(sum(LENGTHS)).float()
    store, _ = made(name, score=score)
    draw = torch.Generator().manual_seed(1)
    held = torch.arange(sum(LENGTHS))
    before, rows = flat(store), store.rows_N()
    for share in (0.8, 0.5, 0.1, 0.0):
        keep_N = torch.rand(len(held), generator=draw) < share
        keep_N[:4] = False  # a whole group of the first row goes
        getattr(store, how)(keep_N)
        held = held[keep_N]
        same(flat(store), [side[held] for side in before])
        assert torch.equal(store.beside["score"][store.index_N()], score[held])
        assert torch.equal(store.rows_N(), rows[held])
        assert store.bytes_held == naive_bytes(store) <= store.bytes_allocated
        if GROUPS in store._held:
            left = {(int(rows[i]), int(before[2][i]) // 4) for i in held}
            assert len(store.tables[KEY_SCALES]) == len(left)
    # Nothing is left, and attention over nothing still runs.
    seen_RS = store.lengths_R[:, None]
    queries = torch.ones(2, 2 * H, 1, D)
    given = (store.offsets_R1, store.lengths_R, seen_RS)
    out = ragged_attention(
        store.asked_by(queries), store.keys, store.values, *given, scaling=1.0, pages=store.pages
    )
    assert not out.any() and store.entries_held == 0


@every_form
def test_sequences_are_chosen_and_repeated(name):
    store, _ = made(name, score=torch.arange(sum(LENGTHS)).float())
    before = flat(store)
    first, second = torch.arange(7), torch.arange(7, 80)
    chosen = store.select_batch(torch.tensor([1, 0, 1]))
    order = torch.cat([second, first, second])
    same(flat(chosen), [side[order] for side in before])
    assert chosen.lengths_R.tolist() == [3, 70, 7, 0, 3, 70]
    assert torch.equal(chosen.beside["score"][chosen.index_N()], order.float())
    assert chosen.bytes_held == naive_bytes(chosen)
    # The copies go their own way.
    keep_N = torch.ones(len(order), dtype=torch.bool)
    keep_N[:73] = False
    chosen.compact_(keep_N)
    same(flat(chosen), [side[order[73:]] for side in before])
    same(flat(store), before)
    alone = store.select_batch(torch.tensor([0]))
    same(flat(alone), [side[first] for side in before])
    if GROUPS in alone._held:
        assert len(alone.tables[KEY_SCALES]) == 2
        assert chosen.bytes_held == naive_bytes(chosen)


@every_form
def test_a_fork_goes_its_own_way(name):
    store, _ = made(name)
    before, other = flat(store), store.fork()
    keep_N = torch.arange(store.entries_held) % 3 == 0
    other.compact_(keep_N)
    same(flat(store), before)
    same(flat(other), [side[keep_N] for side in before])
    store.filter_(~keep_N)
    same(flat(other), [side[keep_N] for side in before])


@every_form
def test_stores_are_joined_row_by_row_or_stacked(name):
    """Joining encodes nothing again."""
    one, _ = made(name, score=torch.arange(80.0))
    form = one.form
    tables = {key: one.tables[key] for key in (CHANNELS, BALANCE) if key in one.tables}
    lengths = [2, 5, 0, 9]
    keys, values, positions = numbers(lengths, seed=7)
    other = PackedStore.encoded(
        form,
        keys,
        values,
        positions + 100,
        torch.tensor(lengths),
        H,
        beside={"score": torch.arange(16.0) + 80},
        rows=tables,
    )
    both = joined([one, other], stack=False)
    parts = [(*flat(own), own.beside["score"][own.index_N()]) for own in (one, other)]
    own = zip(*(zip(a.split(LENGTHS), b.split(lengths), strict=True) for a, b in zip(*parts, strict=True)),
              strict=True)  # fmt: skip
    rows = [[torch.cat(pair) for pair in sides] for sides in own]
    wanted = [torch.cat(sides) for sides in zip(*rows, strict=True)]
    same((*flat(both), both.beside["score"][both.index_N()]), wanted)
    assert both.lengths_R.tolist() == [9, 5, 3, 79] and both.bytes_held == naive_bytes(both)

    stack = joined([one, other, one], stack=True)
    wanted = [torch.cat([a, b, a]) for a, b in zip(*parts, strict=True)]
    same((*flat(stack), stack.beside["score"][stack.index_N()]), wanted)
    assert stack.lengths_R.tolist() == [*LENGTHS, *lengths, *LENGTHS]
    assert stack.bytes_held == naive_bytes(stack)
    same(flat(one), parts[0][:3])


def test_decoded_numbers_are_rounded_to_the_models_precision_once():
    form = form_of("4 bits by channel", torch.bfloat16)
    keys, values, positions = numbers([9, 3], 2)
    store = PackedStore.encoded(
        form, keys.bfloat16(), values.bfloat16(), positions, torch.tensor([9, 3]), H, beside={}, rows={}
    )
    got_keys, got_values, _ = flat(store)
    assert got_keys.dtype == got_values.dtype == torch.bfloat16
    want_keys, want_values, _ = naive(form, keys.bfloat16(), values.bfloat16(), {}, [9, 3])
    assert torch.equal(got_keys, want_keys.bfloat16()) and torch.equal(got_values, want_values.bfloat16())
    assert isinstance(store.keys, Codes)
    assert_close(decode(store.keys, torch.float32)[store.index_N()], want_keys.double())


@pytest.mark.parametrize("name", ["4 bits by channel", "4 bits by token, beyond"])
def test_numbers_beyond_half_precision_are_refused(name):
    form = form_of(name.partition(",")[0])
    keys, values, positions = numbers([5])
    keys[2, 3] = 7e4
    refused(
        "float16, up to 65504",
        PackedStore.encoded,
        form,
        keys,
        values,
        positions,
        torch.tensor([5]),
        1,
        beside={},
        rows={},
    )
