"""Rows of codes against loops over single numbers in float64: codes, groups, rows, and every byte."""

import pytest
import torch

from retain.cache.layout import bytes_of
from retain.cache.precision import GROUPS, Codec
from retain.cache.store import LOG_WEIGHT, RaggedStore
from tests.close import assert_close
from tests.refused import refused

# Values are wider than the channels that share a scale.
D, V, H = 8, 40, 2
# Rows of two sequences; one is empty, one holds less than a group.
LENGTHS = [7, 0, 3, 70]

FORMS = {"8 bits": 8, "4 bits": 4, "2 bits": 2}
every_form = pytest.mark.parametrize("name", FORMS)


def form_of(name, dtype=torch.float32):
    return Codec(FORMS[name], D, V, dtype)


def numbers(lengths, seed=0):
    """Keys with one channel of outliers, and one that is constant; values; positions, row after row."""
    draw, total = torch.Generator().manual_seed(seed), sum(lengths)
    keys, values = torch.randn(total, D, generator=draw), torch.randn(total, V, generator=draw)
    keys[:, 1] *= 20
    keys[:, 2] = 0.75
    return keys, values, torch.cat([torch.arange(length) for length in lengths] or [torch.zeros(0)])


def encoded(codec, keys, values, positions, lengths, **extra):
    """A store of entries that come row after row."""
    lengths = torch.tensor(lengths)
    columns, table = codec.encode(keys, values, lengths)
    columns |= {"positions": positions.int(), **extra}
    return RaggedStore.from_rows(columns, lengths, H, 0, codec, table)


def made(name, lengths=LENGTHS, seed=0, **extra):
    """A store, and what it was made of."""
    keys, values, positions = numbers(lengths, seed)
    return encoded(form_of(name), keys, values, positions, lengths, **extra), (keys, values)


def naive_codes(xs, bits):
    """Numbers of a group after coding, and its step."""
    most, least = max(xs), min(xs)
    least16 = float(torch.tensor(least, dtype=torch.float64).half())
    step16 = float(torch.tensor((most - least16) / (2**bits - 1), dtype=torch.float64).half())
    if step16 <= 0:
        return [least16] * len(xs), 0.0
    codes = [min(max(round((x - least16) / step16), 0), 2**bits - 1) for x in xs]
    return [least16 + step16 * code for code in codes], step16


def naive(form, keys, values, lengths):
    """Keys and values that a store stands for, number by number, 32 to a scale; and the largest step of a
    key."""
    keys_out, values_out, start, steps = keys.tolist(), values.tolist(), 0, [0.0]
    for length in lengths:
        for first in range(start, start + length, 32):
            group = keys_out[first : min(first + 32, start + length)]
            for c in range(D):
                column, step = naive_codes([entry[c] for entry in group], form.bits)
                steps.append(step)
                for entry, x in zip(group, column, strict=True):
                    entry[c] = x
        start += length
    for value in values_out:
        for c in range(0, form.value_dim, 32):
            value[c : c + 32], _ = naive_codes(value[c : c + 32], form.bits)
    return torch.tensor(keys_out), torch.tensor(values_out), max(steps)


def naive_bytes(store):
    """Bytes of what attention reads: codes, scales of values and the number of a group, entry by entry, and
    the scales of each group."""
    form = store.codec
    entry = (
        form.head_dim * form.bits // 8 + form.value_dim * form.bits // 8 + 4 * -(-form.value_dim // 32) + 4
    )
    entry += 4 if LOG_WEIGHT in store.side else 0
    groups = len(set(store.columns[GROUPS][store.index_N()].tolist()))
    return store.entries_held * entry + groups * 2 * 2 * form.head_dim


def flat(store):
    """Decoded keys and values of every entry, and positions."""
    keys_ND, values_NV, positions_N, rows_N = store.flat()
    assert torch.equal(rows_N, store.rows_N())
    return keys_ND, values_NV, positions_N


@every_form
def test_what_is_held_is_what_loops_encode(name):
    store, (keys, values) = made(name)
    want_keys, want_values, step = naive(store.codec, keys, values, LENGTHS)
    got_keys, got_values, positions = flat(store)
    assert_close(got_keys, want_keys.double())
    assert_close(got_values, want_values.double())
    assert torch.equal(positions, numbers(LENGTHS)[2])
    assert store.lengths_R.tolist() == LENGTHS and store.entries_held == sum(LENGTHS)
    assert store.bytes_held == naive_bytes(store) <= bytes_of(store.storages())
    assert step > 0 and not torch.equal(got_values, values)
    assert store.bytes_held < 4 * (D + V) * sum(LENGTHS)


@pytest.mark.parametrize("side", [0, 1])
def test_numbers_beyond_half_precision_are_refused(side):
    *sides, _ = numbers([5, 0])
    sides[side][2, 3] = 7e4
    refused("float16, up to 65504", form_of("4 bits").encode, *sides, torch.tensor([5, 0]))
