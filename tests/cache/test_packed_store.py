"""Rows of codes against loops over single numbers in float64: codes, groups, rows, and every byte."""

import pytest
import torch

from retain.cache.codec import GROUPS, Codec
from retain.cache.layout import bytes_of
from retain.cache.store import LOG_WEIGHT, RaggedStore
from retain.kernels.codes import decode
from retain.kernels.ragged_attention import ragged_attention
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


def encoded(codec, keys, values, positions, lengths, **beside):
    """A store of entries that come row after row."""
    lengths = torch.tensor(lengths)
    entries, table = codec.encode(keys, values, lengths)
    entries["positions"] = positions.int()
    return RaggedStore(entries, lengths, H, slack=0, beside=beside, codec=codec, key_scales_G2D=table)


def made(name, lengths=LENGTHS, seed=0, **beside):
    """A store, and what it was made of."""
    keys, values, positions = numbers(lengths, seed)
    return encoded(form_of(name), keys, values, positions, lengths, **beside), (keys, values)


def naive_codes(xs, bits):
    """One group: what its numbers become, and its step."""
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
    entry += 4 if LOG_WEIGHT in store.beside else 0
    groups = len(set(store.columns[GROUPS][store.index_N()].tolist()))
    return store.entries_held * entry + groups * 2 * 2 * form.head_dim


def flat(store):
    """Decoded keys and values of every entry, and positions."""
    keys_ND, values_NV, positions_N, rows_N = store.flat()
    assert torch.equal(rows_N, store.rows_N())
    return keys_ND, values_NV, positions_N


def same(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


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


@every_form
def test_attention_is_that_over_what_is_decoded(name):
    """What queries ask, over codes, is what they ask of decoded keys; an empty row gives nothing."""
    store, _ = made(name)
    queries = torch.randn(2, 2 * H, 3, D, generator=torch.Generator().manual_seed(4))
    seen_RS = store.lengths_R[:, None].expand(-1, 3).contiguous()
    where = {"scaling": 0.4, "pages": store.pages, "with_lse": True}
    given = (store.offsets_R1, store.lengths_R, seen_RS)
    got, got_lse = ragged_attention(queries, *store.codes, *given, **where)
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
    for share in (0.8, 0.5, 0.1):
        keep_N = torch.rand(len(held), generator=draw) < share
        keep_N[:7] = False  # a whole group goes
        getattr(store, how)(keep_N)
        held = held[keep_N]
        same(flat(store), [side[held] for side in before])
        assert torch.equal(store.beside["score"][store.index_N()], score[held])
        assert torch.equal(store.rows_N(), rows[held])
        assert store.bytes_held == naive_bytes(store) <= bytes_of(store.storages())
        left = {(int(rows[i]), int(before[2][i]) // 32) for i in held}
        assert len(store.key_scales_G2D) == len(left)


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
    assert len(alone.key_scales_G2D) == 1
    assert chosen.bytes_held == naive_bytes(chosen)


def test_decoded_numbers_are_rounded_to_the_models_precision_once():
    form = form_of("4 bits", torch.bfloat16)
    keys, values, positions = numbers([9, 3], 2)
    store = encoded(form, keys.bfloat16(), values.bfloat16(), positions, [9, 3])
    got_keys, got_values, _ = flat(store)
    assert got_keys.dtype == got_values.dtype == torch.bfloat16
    want_keys, want_values, _ = naive(form, keys.bfloat16(), values.bfloat16(), [9, 3])
    assert torch.equal(got_keys, want_keys.bfloat16()) and torch.equal(got_values, want_values.bfloat16())
    assert_close(decode(store.codes[0], torch.float32)[store.index_N()], want_keys.double())


@pytest.mark.parametrize("side", [0, 1])
def test_numbers_beyond_half_precision_are_refused(side):
    *sides, _ = numbers([5, 0])
    sides[side][2, 3] = 7e4
    refused("float16, up to 65504", form_of("4 bits").encode, *sides, torch.tensor([5, 0]))
