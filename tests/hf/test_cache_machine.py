"""A `retain.Cache` against a dense model of it, through whatever a user may do to it in whatever order.

The model knows, of every sequence, its tokens and which positions each (layer, head) holds. Evictions drop
entries at random at the moments of the regime. When all is over, each conversation is read once more from
scratch by the oracle, forward by forward, under masks of what was held then: keys, values and logits of all
forwards must agree.
"""

import copy
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from retain.hf.cache.cache import Cache
from retain.hf.intercept.attach import attach
from retain.hf.version_names import CACHE
from tests.close import MODEL, assert_close
from tests.held import row_of
from tests.hf.masked import masked, positions_of
from tests.hf.moments import FullCache
from tests.tiny import PAD, VOCAB, tiny_model

LAYERS, HEADS, EVERY = 2, 2, 4
WHEN = ("prefill", "prefill", "chunk", "chunk+decode")
Held = list[list[set[int]]]


@dataclass
class Forward:
    """A forward, as one sequence sees it."""

    ids: Tensor
    valid: Tensor
    logits: Tensor
    held: Held  # once it was over


@dataclass
class Sequence:
    """The forwards of a sequence, and the positions that each (layer, head) holds."""

    forwards: list[Forward] = field(default_factory=list)
    held: Held = field(default_factory=lambda: [[set() for _ in range(HEADS)] for _ in range(LAYERS)])

    @property
    def valid(self) -> Tensor:
        return torch.cat([one.valid for one in self.forwards])

    def crop(self, length: int) -> None:
        """Forget all but the first tokens."""
        left, kept = length, []
        for one in self.forwards:
            if left > 0:
                kept.append(Forward(one.ids[:left], one.valid[:left], one.logits[:left], one.held))
            left -= len(one.ids)
        self.forwards = kept
        before = int(self.valid.sum())
        self.held = [[{p for p in head if p < before} for head in layer] for layer in self.held]
        kept[-1].held = copy.deepcopy(self.held)


@dataclass
class Conversation:
    cache: Cache
    rows: list[Sequence]
    evicted_at: int = 0  # tokens seen when something went last

    @property
    def mask(self) -> Tensor:
        return torch.stack([row.valid for row in self.rows])


class CacheMachine(RuleBasedStateMachine):
    model = tiny_model("llama", dtype=torch.float64)
    did: dict[str, int] = {}

    def __init__(self) -> None:
        super().__init__()
        self.handle = attach(self.model)
        self.talks: list[Conversation] = []
        self.talk: Conversation | None = None
        self.draw = torch.Generator().manual_seed(0)
        self.rate = 0.0

    def count(self, what: str) -> None:
        self.did[what] = self.did.get(what, 0) + 1

    def decide(self, evidence) -> Tensor:
        """The policy: drops at random, after a look at whether what it is shown is what the model holds."""
        assert self.talk is not None
        exists, layer = evidence.exists_BHT, evidence.layer_idx
        keep = exists & (torch.rand(exists.shape, generator=self.draw) >= self.rate)
        for b, row in enumerate(self.talk.rows):
            for h in range(HEADS):
                shown = evidence.positions_BT[b][exists[b, h]].tolist()
                assert shown == sorted(row.held[layer][h])
                row.held[layer][h] = set(evidence.positions_BT[b][keep[b, h]].tolist())
        if int((exists & ~keep).sum()):
            self.talk.evicted_at = self.talk.cache.get_seq_length() or int(self.talk.mask.shape[1])
            self.count("evicted again" if evidence.held_BHT is not None else "evicted")
        return keep

    @torch.no_grad()
    def forward(self, talk: Conversation, valid: Tensor, rate: float, seed: int) -> None:
        B, S = valid.shape
        self.draw.manual_seed(seed)
        ids = torch.where(valid, torch.randint(2, VOCAB, (B, S), generator=self.draw), PAD)
        for b, row in enumerate(talk.rows):
            before = sum(int(one.valid.sum()) for one in row.forwards)
            row.forwards.append(Forward(ids[b], valid[b], torch.empty(0), []))
            for layer in row.held:
                for head in layer:
                    head |= set(range(before, before + int(valid[b].sum())))
        self.talk, self.rate = talk, rate
        mask = talk.mask.long()
        logits = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions_of(mask)[:, -S:],
            **{CACHE: talk.cache},
        ).logits
        for b, row in enumerate(talk.rows):
            row.forwards[-1].logits = logits[b]
            row.forwards[-1].held = copy.deepcopy(row.held)
        self.check(talk)

    def check(self, talk: Conversation) -> None:
        """The cache holds what the model holds."""
        cache = talk.cache
        assert cache.batch_size == len(talk.rows) and torch.equal(cache.state.valid_BT, talk.mask)
        entries = 0
        for layer in range(LAYERS):
            store = cache.layers[layer].store
            for b, row in enumerate(talk.rows):
                for h in range(HEADS):
                    assert row_of(store, b, h)[2].tolist() == sorted(row.held[layer][h])
                    entries += len(row.held[layer][h])
        assert cache.entries_held == entries and cache.state.evicted_at == talk.evicted_at

    def pick(self, data) -> Conversation:
        return self.talks[data.draw(st.integers(0, len(self.talks) - 1))]

    @initialize(data=st.data(), rate=st.sampled_from([0.3, 0.6]), seed=st.integers(0, 99))
    def start(self, data, rate, seed) -> None:
        B, S = data.draw(st.integers(1, 3)), data.draw(st.integers(4, 14))
        pads = torch.tensor([data.draw(st.integers(0, S - 1)) for _ in range(B)])
        when = data.draw(st.sampled_from(WHEN))
        cache = Cache(self.model, policy=self.decide, when=when, every=EVERY)
        talk = Conversation(cache, [Sequence() for _ in range(B)])
        self.talks.append(talk)
        self.forward(talk, torch.arange(S) >= pads[:, None], rate, seed)

    @rule(data=st.data(), rate=st.sampled_from([0.0, 0.4, 0.8]), seed=st.integers(0, 99))
    def read(self, data, rate, seed) -> None:
        """A turn, left-padded where nothing is evicted later: of some sequences nothing may be in it."""
        talk = self.pick(data)
        S = data.draw(st.integers(2, 7))
        most = 0 if talk.cache.state.when.again else S
        pads = torch.tensor([data.draw(st.integers(0, most)) for _ in talk.rows])
        self.forward(talk, torch.arange(S) >= pads[:, None], rate, seed)

    @rule(data=st.data(), num=st.integers(1, 5), rate=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 99))
    def decode(self, data, num, rate, seed) -> None:
        talk = self.pick(data)
        for step in range(num):
            self.forward(talk, torch.ones(len(talk.rows), 1, dtype=torch.bool), rate, seed + step)

    @rule(data=st.data(), ahead=st.integers(0, 3), back=st.integers(1, 4), seed=st.integers(0, 99))
    def crop(self, data, ahead, back, seed) -> None:
        """Some tokens ahead, and then back."""
        talk = self.pick(data)
        for step in range(ahead):
            self.forward(talk, torch.ones(len(talk.rows), 1, dtype=torch.bool), 0.3, seed + step)
        seen = talk.cache.num_seen
        length = max(1, seen - back)
        before = talk.cache.report(), talk.cache.state.evicted_at
        try:
            talk.cache.crop(length if data.draw(st.booleans()) else length - seen)
        except ValueError as error:
            assert "fork() the cache before it reads" in str(error)
            assert length < max(talk.evicted_at, talk.cache.state.last_due)
            assert (talk.cache.report(), talk.cache.state.evicted_at) == before
            self.count("crop refused")
        else:
            assert length >= talk.evicted_at
            if any(int(row.valid[:length].sum()) < int(row.valid.sum()) for row in talk.rows):
                self.count("crop")
            for row in talk.rows:
                row.crop(length)
        self.check(talk)

    @precondition(lambda self: len(self.talks) < 4)
    @rule(data=st.data())
    def fork(self, data) -> None:
        talk = self.pick(data)
        rows = [copy.deepcopy(row) for row in talk.rows]
        self.talks.append(Conversation(talk.cache.fork(), rows, talk.evicted_at))
        self.check(self.talks[-1])

    @rule(data=st.data())
    def select(self, data) -> None:
        talk = self.pick(data)
        last = len(talk.rows) - 1
        chosen = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4))
        talk.cache.batch_select_indices(torch.tensor(chosen))
        talk.rows = [copy.deepcopy(talk.rows[b]) for b in chosen]
        self.check(talk)

    @rule(data=st.data())
    def save_and_load(self, data) -> None:
        talk = self.pick(data)
        with tempfile.TemporaryDirectory() as folder:
            path = talk.cache.save(Path(folder) / "context.safetensors")
            talk.cache = Cache.load(path, self.model, policy=self.decide)
        self.count("saved")
        self.check(talk)

    def teardown(self) -> None:
        self.handle.undo()
        for talk in self.talks:
            self.check(talk)
            replay(self.model, talk)


@torch.no_grad()
def replay(model, talk: Conversation) -> None:
    """Everything once more by the oracle, and compared."""
    mask, full = talk.mask.long(), FullCache(model)
    seen = 0
    with masked(model, None, mask) as kept:
        for number in range(len(talk.rows[0].forwards)):
            parts = [row.forwards[number] for row in talk.rows]
            ids = torch.stack([one.ids for one in parts])
            seen += ids.shape[1]
            where = positions_of(mask[:, :seen])
            logits = model(
                input_ids=ids,
                attention_mask=mask[:, :seen],
                position_ids=where[:, -ids.shape[1] :],
                **{CACHE: full},
            ).logits
            for b, one in enumerate(parts):
                assert_close(one.logits[one.valid], logits[b][one.valid], dtype=torch.float32, ops=MODEL)
                for layer in range(LAYERS):
                    if b == 0:
                        kept[layer] = torch.zeros(len(parts), HEADS, seen, dtype=torch.bool)
                    for h in range(HEADS):
                        held = torch.tensor(sorted(one.held[layer][h]), dtype=torch.int64)
                        kept[layer][b, h] = torch.isin(where[b], held) & mask[b, :seen].bool()
    for layer in range(LAYERS):
        store = talk.cache.layers[layer].store
        for b in range(len(talk.rows)):
            for h in range(HEADS):
                keys, values, _ = row_of(store, b, h)
                kept_T, dense = kept[layer][b, h], full.layers[layer]
                assert_close(keys, dense.keys[b, h][kept_T], dtype=torch.float32, ops=MODEL)
                assert_close(values, dense.values[b, h][kept_T], dtype=torch.float32, ops=MODEL)


# Nothing quicker forks, crops, chooses and saves one conversation in any order.
@pytest.mark.always
@pytest.mark.filterwarnings("ignore")
def test_a_cache_is_its_dense_model():
    CacheMachine.did = {}
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            derandomize=True,
            database=None,
            deadline=None,
            max_examples=20,
            stateful_step_count=12,
            phases=[Phase.generate],  # to make a failure smaller takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    # Everything was met, and more than once.
    for what in ("evicted", "evicted again", "crop", "crop refused", "saved"):
        assert CacheMachine.did.get(what, 0) >= 2, CacheMachine.did
