"""Stores with packed entries against plain lists: what is packed is packed once."""

import copy

import pytest
import torch

from retain.cache.attend import attend_store
from retain.cache.layout import bytes_of
from retain.cache.precision import GROUPS, Precision
from retain.cache.store import LOG_WEIGHT, RaggedStore, stacked
from tests.close import assert_close
from tests.refused import refused

# Entries are wider than the channels that share a scale of values.
H, G, D, V, TOKENS = 2, 2, 40, 40, 4000
PRECISIONS = {"plain": None, "8 bits": 8, "4 bits": 4, "2 bits": 2}
every_precision = pytest.mark.parametrize("name", PRECISIONS)
KEYS = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(1))
KEYS[:, 1] *= 20  # a channel of outliers, and one that is constant
KEYS[:, 2] = 0.75
VALUES = torch.randn(TOKENS, V, generator=torch.Generator().manual_seed(2)) + 1
SCORE = torch.arange(TOKENS).float()


def precision_of(name):
    return None if PRECISIONS[name] is None else Precision(PRECISIONS[name], recent=3)


def naive_codes(xs, bits):
    """Numbers of a group after coding."""
    most, least = max(xs), min(xs)
    least16 = float(torch.tensor(least, dtype=torch.float64).half())
    step16 = float(torch.tensor((most - least16) / (2**bits - 1), dtype=torch.float64).half())
    if step16 <= 0:
        return [least16] * len(xs)
    codes = [min(max(round((x - least16) / step16), 0), 2**bits - 1) for x in xs]
    return [least16 + step16 * code for code in codes]


def naive(form, keys, values):
    """Keys and values that entries of one row stand for, number by number, 32 to a scale."""
    keys_out, values_out = keys.tolist(), values.tolist()
    for first in range(0, len(keys_out), 32):
        group = keys_out[first : first + 32]
        for c in range(D):
            for entry, x in zip(group, naive_codes([entry[c] for entry in group], form.bits), strict=True):
                entry[c] = x
    for value in values_out:
        for c in range(0, form.value_dim, 32):
            value[c : c + 32] = naive_codes(value[c : c + 32], form.bits)
    return torch.tensor(keys_out), torch.tensor(values_out)


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


class Life:
    """A store, and for each row a list of [token, position, key, value], the last two once it was packed."""

    def __init__(self, name, seed, batch=2, num=60):
        self.draw = torch.Generator().manual_seed(seed)
        self.tokens, self.precision = 0, precision_of(name)
        tokens = self.new(batch, num)
        keep = torch.rand(batch, H, num, generator=self.draw) < 0.7
        keep[0, 1] = False  # an empty row
        keep[1, 0, 2:] = False  # less than the recent
        positions = torch.arange(num).expand(batch, num)
        side = {"score": SCORE[tokens]}
        self.store = RaggedStore.from_dense(KEYS[tokens], VALUES[tokens], positions, keep, 5, side)
        self.store.precision = self.precision
        self.rows = [
            [[int(tokens[b, h, t]), t, None, None] for t in range(num) if keep[b, h, t]]
            for b in range(batch)
            for h in range(H)
        ]
        self.seen = [num] * batch

    def new(self, batch, num):
        self.tokens += batch * H * num
        return torch.arange(self.tokens - batch * H * num, self.tokens).view(batch, H, num)

    def append(self, num, padded=False):
        batch = len(self.seen)
        tokens = self.new(batch, num)
        valid = torch.rand(batch, num, generator=self.draw) < (0.6 if padded else 2.0)
        positions = torch.tensor(self.seen)[:, None] + valid.cumsum(-1) - 1
        new = KEYS[tokens], VALUES[tokens], positions, valid if padded else None
        seen_RS = self.store.append_(*new)
        self.store.set_side_("score", SCORE[tokens], valid)
        for row, held in enumerate(self.rows):
            b, h = divmod(row, H)
            for s in range(num):
                if valid[b, s]:
                    held.append([int(tokens[b, h, s]), int(positions[b, s]), None, None])
                plain = sum(entry[2] is None for entry in held) if valid[b, s] else 0
                assert int(seen_RS[row, s]) == plain
        self.seen = [seen + int(count) for seen, count in zip(self.seen, valid.sum(-1), strict=True)]

    def pack(self):
        """Pack, and take down what became of each entry that loops have encoded alike."""
        self.store.pack_()
        for each in self.rows if self.precision is not None else ():
            plain = [entry for entry in each if entry[2] is None]
            packed = plain[: max(0, len(plain) - self.precision.recent)]
            if not packed:
                continue
            tokens = [entry[0] for entry in packed]
            made = naive(self.store.packed.codec, KEYS[tokens], VALUES[tokens])
            for entry, key, value in zip(packed, *made, strict=True):
                entry[2:] = key, value

    def order(self):
        """Row and number of every entry, in the order of the store: packed ones first."""
        return [
            (row, number)
            for plain in (False, True)
            for row, each in enumerate(self.rows)
            for number, entry in enumerate(each)
            if (entry[2] is None) == plain
        ]

    def evict(self, share, in_place):
        order = [(row, number) for row, number in self.order() if self.rows[row][number][2] is None]
        keep_N = torch.rand(len(order), generator=self.draw) < share
        (self.store.compact_ if in_place else self.store.filter_)(keep_N)
        removed = {pair for pair, keep in zip(order, keep_N.tolist(), strict=True) if not keep}
        self.rows = [
            [entry for number, entry in enumerate(each) if (row, number) not in removed]
            for row, each in enumerate(self.rows)
        ]

    def only(self, wanted):
        """Entries of which a row and a position say so."""
        self.rows = [[entry for entry in each if wanted(row, entry[1])] for row, each in enumerate(self.rows)]

    def check(self):
        order = self.order()
        entries = [self.rows[row][number] for row, number in order]
        keys, values, positions, rows = self.store.flat()
        plain = [entry[2] is None for entry in entries]
        want_keys = [KEYS[token] if key is None else key for token, _, key, _ in entries]
        want_values = [VALUES[token] if value is None else value for token, _, _, value in entries]
        wanted = torch.stack([*want_keys, torch.zeros(D)])[:-1], torch.stack([*want_values, torch.ones(V)])
        assert_close(keys, wanted[0].double())
        assert_close(values, wanted[1][:-1].double())
        mask = torch.tensor(plain, dtype=torch.bool)
        assert torch.equal(keys[mask], wanted[0][mask])
        assert positions.tolist() == [entry[1] for entry in entries]
        assert rows.tolist() == [row for row, _ in order]
        assert self.store.lengths_BH.flatten().tolist() == [len(each) for each in self.rows]
        score = torch.cat([part.side["score"][part.index_N()] for part in self.store.parts])
        assert torch.equal(score, SCORE[[entry[0] for entry in entries]])
        plain_bytes = sum(plain) * (D + V) * 4
        packed_bytes = 0 if self.store.packed is None else naive_bytes(self.store.packed)
        assert self.store.bytes_held == plain_bytes + packed_bytes <= self.store.bytes_allocated
        assert self.store.entries_held == len(entries)
        held = [tensor for part in self.store.parts for tensor in part.storages()]
        assert self.store.bytes_allocated == bytes_of(held)
        assert self.store.packed is None or self.store.packed.entries_held


@pytest.mark.parametrize("seed", range(3))
@every_precision
def test_a_packed_store_is_what_plain_lists_say(name, seed):
    """Random lives: entries come, are packed, go; sequences are chosen, tokens forgotten. Plain entries never
    are packed."""
    life = Life(name, seed)
    life.check()
    choice = torch.Generator().manual_seed(seed + 50)
    actions = ["pack", "pack", "append", "evict", "select", "crop", "fork", "append", "pack"]
    for number in range(14):
        action = "pack" if number == 0 else actions[int(torch.randint(9, (1,), generator=choice))]
        aside = None
        if action == "pack":
            life.pack()
        elif action == "append":
            life.append(1 + 4 * (number % 3), padded=number % 2 == 0)
        elif action == "evict":
            life.evict((0.9, 0.5, 0.0)[(number + seed) % 3], in_place=number % 2 == 0)
        elif action == "select":
            idx = torch.tensor([[1, 0], [0, 0], [0, 1]][number % 3])
            life.store = life.store.select_batch(idx)
            rows = [row * H + h for row in idx.tolist() for h in range(H)]
            life.rows = [copy.deepcopy(life.rows[row]) for row in rows]
            life.seen = [life.seen[row] for row in idx.tolist()]
        elif action == "crop":
            before = [max(1, seen - 4 * b) for b, seen in enumerate(life.seen)]
            life.store.crop_(torch.tensor(before))
            life.only(lambda row, position, before=before: position < before[row // H])
            life.seen = before
        else:
            aside = life.store
            life.store = life.store.fork()
            before = aside.flat()
            life.append(2)
            life.pack()
            life.evict(0.5, in_place=True)
            assert all(torch.equal(a, b) for a, b in zip(aside.flat(), before, strict=True))
        life.check()


@pytest.mark.parametrize("how", [{}, {"soft_cap": 2.0}, {"sinks": True}, {"log_weight": True}])
@every_precision
def test_attention_is_one_softmax_over_all_entries(name, how):
    life = Life(name, seed=5)
    life.pack()
    life.append(6)
    life.pack()
    life.append(2)
    store, S = life.store, 2
    draw = torch.Generator().manual_seed(9)
    queries = torch.randn(2, H * G, S, D, generator=draw)
    sinks = torch.randn(H * G, generator=draw) if "sinks" in how else None
    if "log_weight" in how:
        for part in store.parts:
            part.write_side_(LOG_WEIGHT, torch.rand(len(part.index_N()), generator=draw) * 2)
    at = torch.tensor(life.seen)[:, None] + torch.arange(-S, 0)
    seen_RS = store.lengths_R[:, None] + torch.tensor([-1, 0], dtype=torch.int32)
    seen_RS[2:, 0] = 0  # padding in the second sequence
    out = attend_store(
        store,
        queries,
        seen_RS,
        sinks_Q=sinks,
        scaling=0.6,
        soft_cap=how.get("soft_cap"),
    )
    keys, values, positions, rows = store.flat()
    added = torch.zeros(len(keys))
    if "log_weight" in how:
        added = torch.cat([part.log_weight_C[part.index_N()] for part in store.parts])
    for b, q, s in [(b, q, s) for b in range(2) for q in range(H * G) for s in range(S)]:
        each = (rows == b * H + q // G) & (positions <= at[b, s])
        if int(seen_RS[b * H + q // G, s]) == 0:
            each[:] = False
        logits = keys[each].double() @ queries[b, q, s].double() * 0.6
        logits = how["soft_cap"] * torch.tanh(logits / how["soft_cap"]) if "soft_cap" in how else logits
        weights = (logits + added[each].double()).exp()
        total = weights.sum() + (0 if sinks is None else sinks[q].double().exp())
        wanted = (weights[:, None] * values[each].double()).sum(0) / total.clamp_min(1e-30)
        assert_close(out[b, q, s], wanted, ops=8)


@every_precision
def test_stores_packed_or_not_are_stacked(name):
    """Two packed stores, one with a precision and nothing packed, and a plain one."""
    one, two, three = Life(name, 1), Life(name, 2, num=20), Life("8 bits", 3)
    one.pack()
    two.pack()
    four = Life("plain", 4).store
    stores = [one.store, two.store, three.store, four]
    parts = [store.flat() for store in stores]
    whole = stacked(stores, 5)
    order = whole.flat()[3].argsort(stable=True)
    starts = [0, 2 * H, 4 * H, 6 * H]
    each = [torch.cat(sides) for sides in zip(*((*part[:3], part[3] + start) for part, start in
                                               zip(parts, starts, strict=True)), strict=True)]  # fmt: skip
    wanted = each[3].argsort(stable=True)
    for got, want in zip(whole.flat(), each, strict=True):
        assert torch.equal(got[order], want[wanted])
    assert torch.equal(whole.lengths_BH, torch.cat([store.lengths_BH for store in stores]))
    assert stacked([three.store, four], 5).packed is None
    # The stack shares nothing with its parts.
    whole.compact_(torch.arange(len(whole.index_N())) % 2 == 0)
    for store, part in zip(stores, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(store.flat(), part, strict=True))


def test_numbers_that_do_not_fit_leave_all_as_it_was():
    life = Life("4 bits", 1)
    life.pack()
    life.append(8)
    life.store.values_CD[life.store.index_N()[0], 2] = 1e5
    before, packed = life.store.flat(), life.store.packed
    refused("float16, up to 65504", life.store.pack_)
    assert all(torch.equal(a, b) for a, b in zip(life.store.flat(), before, strict=True))
    assert life.store.packed is packed
