"""A store driven through random operations, beside a model of it in plain Python lists.

The model holds, for each sequence and KV head, a list of (token, position): a token's key, value and side
columns are rows of tables, so that every entry can be told from every other one. After each operation the
store must hold exactly what the lists hold; at random moments its attention must be that over the lists.
"""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from retain.cache.attend import attend
from retain.cache.file_format import store_of, tensors_of
from retain.cache.layer_store import Store, stacked
from retain.cache.store import RaggedStore, tail_index_RS
from tests.close import assert_close
from tests.test_cache import assert_counts

H, G, D, TOKENS = 2, 2, 8, 20_000
SETTINGS = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True, database=None)
SEEDS = st.integers(0, 2**20)


def table(*shape):
    return torch.randn(TOKENS, *shape, generator=torch.Generator().manual_seed(len(shape)))


KEYS, VALUES = table(D), table(D) + 1
BESIDE = {"score": table(), "norm": table(G), "access": torch.arange(TOKENS)}


class StoreMachine(RuleBasedStateMachine):
    """`rows[b][h]` is a list of (token, position); `seen[b]` the position of the sequence's next token."""

    def __init__(self):
        super().__init__()
        self.tokens = 0
        self.aside = None  # a store that was forked, and its model: nothing below may change it

    def draw(self, shape, seed, share):
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share

    def new_tokens(self, batch, num):
        """Tokens `[B, H, S]` that no entry has yet."""
        count = batch * H * num
        self.tokens += count
        assert self.tokens <= TOKENS
        return torch.arange(self.tokens - count, self.tokens).view(batch, H, num)

    @initialize(
        batch=st.integers(1, 3), num=st.sampled_from([1, 5, 63, 64, 90]), slack=st.integers(0, 40), seed=SEEDS
    )
    def fill(self, batch, num, slack, seed):
        tokens, keep = self.new_tokens(batch, num), self.draw((batch, H, num), seed, 0.6)
        positions = torch.arange(num).expand(batch, num) + torch.arange(batch)[:, None]
        self.rows = [
            [
                [(int(tokens[b, h, t]), int(positions[b, t])) for t in range(num) if keep[b, h, t]]
                for h in range(H)
            ]
            for b in range(batch)
        ]
        self.seen = [num + b for b in range(batch)]
        beside = {name: column[tokens] for name, column in BESIDE.items()}
        plain = RaggedStore.from_dense(KEYS[tokens], VALUES[tokens], positions, keep, slack, beside)
        self.store = Store(plain)

    @rule(num=st.sampled_from([1, 1, 1, 2, 5, 70]), padded=st.booleans(), seed=SEEDS)
    def append(self, num, padded, seed):
        batch = len(self.rows)
        tokens = self.new_tokens(batch, num)
        valid = self.draw((batch, num), seed, 0.7) if padded else torch.ones(batch, num, dtype=torch.bool)
        positions = torch.tensor(self.seen)[:, None] + valid.cumsum(-1) - 1
        sees = self.store.plain.append_(KEYS[tokens], VALUES[tokens], positions, valid if padded else None)
        for name, column in BESIDE.items():
            self.store.set_side_(name, column[tokens], valid)
        for b in range(batch):
            for h in range(H):
                for s in range(num):
                    if valid[b, s]:
                        self.rows[b][h].append((int(tokens[b, h, s]), int(positions[b, s])))
                    assert int(sees[b * H + h, s]) == (len(self.rows[b][h]) if valid[b, s] else 0)
            self.seen[b] += int(valid[b].sum())
        index, real = tail_index_RS(self.store.plain, valid)
        assert torch.equal(real, valid.repeat_interleave(H, 0))
        assert index.min() >= 0 and index.max() < max(1, len(self.store.keys_CD))
        assert torch.equal(self.store.side["access"][index][real], tokens.flatten(0, 1)[real])

    @rule(in_place=st.booleans(), share=st.sampled_from([0.0, 0.1, 0.8, 0.97, 1.0]), seed=SEEDS)
    def evict(self, in_place, share, seed):
        keep = self.draw((self.store.entries_held,), seed, share)
        self.rows = [
            [[entry for entry, kept in self.paired(b, h, keep.tolist()) if kept] for h in range(H)]
            for b in range(len(self.rows))
        ]
        self.store.evict_(keep, in_place=in_place)

    def paired(self, b, h, keep):
        """A row's entries with their elements of `keep`."""
        lengths = [len(row) for heads in self.rows for row in heads]
        start = sum(lengths[: b * H + h])
        return zip(self.rows[b][h], keep[start : start + lengths[b * H + h]], strict=True)

    @rule(back=st.integers(0, 30))
    def crop(self, back):
        before = [max(0, seen - back - b) for b, seen in enumerate(self.seen)]
        self.rows = [
            [[entry for entry in row if entry[1] < before[b]] for row in heads]
            for b, heads in enumerate(self.rows)
        ]
        self.seen = before
        self.store.crop_(torch.tensor(before))

    @rule(share=st.sampled_from([0.1, 0.9]), seed=SEEDS)
    def drop(self, share, seed):
        gone = self.draw((len(self.rows), max(self.seen) + 1), seed, share)
        self.rows = [
            [[entry for entry in row if not gone[b, entry[1]]] for row in heads]
            for b, heads in enumerate(self.rows)
        ]
        self.store.drop_(gone)

    @rule(swap=st.booleans())
    def fork(self, swap):
        """One of the two goes on; the other must stay as it is."""
        model = copy.deepcopy((self.rows, self.seen))
        other = self.store.fork()
        self.aside = (self.store if swap else other, model)
        self.store = other if swap else self.store

    @rule(data=st.data())
    def select(self, data):
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        self.store = self.store.select_batch(torch.tensor(chosen))
        self.rows = [copy.deepcopy(self.rows[b]) for b in chosen]
        self.seen = [self.seen[b] for b in chosen]

    @precondition(lambda self: self.aside is not None and len(self.rows) <= 3)
    @rule(slack=st.sampled_from([None, 0, 50]))
    def concat(self, slack):
        store, (rows, seen) = self.aside
        self.store = stacked([self.store, store], slack)
        self.rows, self.seen = self.rows + copy.deepcopy(rows), self.seen + seen
        self.aside = None

    @rule()
    def save_and_load(self):
        tensors = {name: tensor.clone() for name, tensor in tensors_of(self.store.plain).items()}
        self.store = Store(store_of(tensors, H, self.store.plain.slack))

    @rule(num=st.sampled_from([1, 2, 9]), window=st.sampled_from([None, 10]), seed=SEEDS)
    def attend(self, num, window, seed):
        generator, batch = torch.Generator().manual_seed(seed), len(self.rows)
        queries = torch.randn(batch, H * G, num, D, generator=generator)
        plain = self.store.plain
        lengths = plain.lengths_R.to(torch.int64)
        sees = (torch.rand(batch * H, num, generator=generator) * (lengths + 1)[:, None]).long()
        sees[:, -1] = lengths
        at = torch.tensor(self.seen)[:, None].expand(batch, num)
        out = attend(plain, queries, sees, scaling=0.4, window=window, query_positions_BS=at)
        assert_close(out, self.masked(queries.double(), sees, window))

    def masked(self, queries, sees, window):
        """Dense attention over all tokens that any row holds, with -inf on what a query does not see."""
        column = {}  # of each token that is held
        for heads in self.rows:
            for token, _ in (entry for row in heads for entry in row):
                column.setdefault(token, len(column))
        if not column:
            return torch.zeros_like(queries)
        tokens = torch.tensor(list(column))
        visible = torch.zeros(*queries.shape[:3], len(column), dtype=torch.bool)
        for b, heads in enumerate(self.rows):
            for h, row in enumerate(heads):
                for s in range(queries.shape[2]):
                    for token, position in row[: int(sees[b * H + h, s])]:
                        recent = window is None or position > self.seen[b] - window
                        visible[b, h * G : (h + 1) * G, s, column[token]] |= recent
        logits = (queries @ KEYS[tokens].double().T * 0.4).masked_fill(~visible, -torch.inf)
        return torch.softmax(logits, -1).nan_to_num(0.0) @ VALUES[tokens].double()

    @invariant()
    def nothing_is_lost_or_made_up(self):
        self.compare(self.store, self.rows)
        if self.aside is not None:
            store, (rows, _) = self.aside
            self.compare(store, rows)

    def compare(self, store, rows):
        entries = [entry for heads in rows for row in heads for entry in row]
        tokens = torch.tensor([token for token, _ in entries], dtype=torch.int64)
        positions = torch.tensor([position for _, position in entries], dtype=torch.int64)
        assert store.lengths_BH.tolist() == [[len(row) for row in heads] for heads in rows]
        keys, values, at, of_rows = store.flat()
        assert torch.equal(keys, KEYS[tokens]) and torch.equal(values, VALUES[tokens])
        assert torch.equal(at, positions)
        assert of_rows.tolist() == [
            b * H + h for b, heads in enumerate(rows) for h in range(H) for _ in heads[h]
        ]
        index = store.index_N()
        assert store.side.keys() == BESIDE.keys()
        for name, column in BESIDE.items():
            assert torch.equal(store.side[name][index], column[tokens])
        assert_counts(store.plain)


# Nothing quicker holds what single changes of a store do to one another.
@pytest.mark.always
def test_a_store_is_what_plain_lists_say():
    run_state_machine_as_test(StoreMachine, settings=SETTINGS)
