"""Scenarios of a cache's life, forward by forward: what is read, what comes out, what is held after each."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import retain
from retain.gates import GateSet
from retain.hf.cache.cache import Cache
from retain.hf.version_names import CACHE
from retain.presets import Policy
from retain.protection import Protection
from tests.close import assert_close
from tests.hf.masked import masked_logits, positions_of
from tests.hf.naive_regimes import Naive
from tests.tiny import SINGLE, VOCAB, tiny_batch, tiny_model

PADS = {1: (0,), 3: (0, 3, 11)}
SEEDS = (3, 4, 5)
# Protects little, so that scores decide.
FEW = Protection(sinks=1, prefix_fraction=0.0, suffix_fraction=0.0, minimum=0, recent=2)


@dataclass(frozen=True)
class Life:
    """Chunks of a prompt, a turn, single tokens, in the order in which they come.

    Args:
        chunks: token ids `[B, S]`.
        mask: over all of them.
        prompt: how many of them are the first prompt.
    """

    chunks: list[Tensor]
    mask: Tensor
    prompt: int


def life(
    batch: int = 3,
    *,
    pads: tuple[int, ...] | None = None,
    tokens: int = 40,
    chunk: int | None = 16,
    steps: tuple[int, int] = (4, 2),
    turn: int = 7,
    seed: int = 1,
) -> Life:
    """A left-padded prompt in chunks, single tokens, a turn, single tokens."""
    ids, mask = tiny_batch(PADS[batch] if pads is None else pads, tokens, seed=seed)
    new, new_mask = tiny_batch((0,) * len(mask), turn, seed=seed + 4)
    draw = torch.Generator().manual_seed(seed)
    before, after = (
        list(torch.randint(2, VOCAB, (number, len(mask), 1), generator=draw)) for number in steps
    )
    prompt = list(ids.split(chunk or tokens, dim=1))
    ones = mask.new_ones(len(mask), 1)
    whole = torch.cat([mask, *[ones] * steps[0], *[new_mask] * (turn > 0), *[ones] * steps[1]], dim=1)
    return Life([*prompt, *before, *[new] * (turn > 0), *after], whole, len(prompt))


@torch.no_grad()
def stepwise(model, cache: Cache, life: Life) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Logits of each forward, and what each layer held after it, `[B, H, T]` over all tokens seen."""
    seen = 0
    if life.prompt > 1:
        width = sum(ids.shape[1] for ids in life.chunks[: life.prompt])
        cache.state.prompt_mask_BT = life.mask[:, :width].bool()
    for ids in life.chunks:
        mask = life.mask[:, : seen + ids.shape[1]]
        given = {"attention_mask": mask, "position_ids": positions_of(mask)[:, seen:]}
        logits = model(input_ids=ids, **{CACHE: cache}, **given).logits
        seen += ids.shape[1]
        yield logits, held_by(cache, mask)


def lived(model, cache: Cache, life: Life) -> tuple[list[Tensor], list[list[Tensor]]]:
    """All of `stepwise`."""
    logits, history = zip(*stepwise(model, cache, life), strict=True)
    return list(logits), list(history)


@functools.cache
def exact_model(family: str = "qwen3") -> PreTrainedModel:
    """A tiny model in float64 where the family has that, never attached, one for all tests."""
    return tiny_model(family, dtype=torch.float32 if family in SINGLE else torch.float64)


def gates_of(model: PreTrainedModel) -> GateSet:
    """Random gates, whose scores differ enough to matter; float64, so that a token that comes twice has one
    score wherever in a product it stands, on every CPU."""
    gates = retain.new_gates(model, "linear").double()
    draw = torch.Generator().manual_seed(0)
    for parameter in gates.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return gates


FREE: dict[tuple, list[Tensor]] = {}


def eviction_free(model: PreTrainedModel, scenario: Life) -> list[Tensor]:
    """Logits of the full cache: the control of every test, run once for each life of a model."""
    sizes = tuple(ids.shape[1] for ids in scenario.chunks)
    parts = (tuple(part.flatten().tolist()) for part in (torch.cat(scenario.chunks, 1), scenario.mask))
    key = (id(model), sizes, *parts)
    if key not in FREE:
        FREE[key] = masked_logits(model, None, scenario.chunks, scenario.mask)
    return FREE[key]


def held_by(cache: Cache, mask: Tensor) -> list[Tensor]:
    """Which tokens each (layer, sequence, head) holds."""
    answer = []
    for layer in cache.state.ragged:
        H = layer.store.num_heads
        held = torch.zeros(len(mask), H, mask.shape[1], dtype=torch.bool)
        positions, rows = (column.cpu() for column in layer.store.flat()[2:])
        for b in range(len(mask)):
            scenario = mask[b].nonzero().flatten()
            for h in range(H):
                mine = positions[rows == b * H + h]
                assert bool((mine[1:] > mine[:-1]).all())  # in order, none twice
                held[b, h, scenario[mine]] = True
        answer.append(held)
    return answer


def assert_same_logits(got: Sequence[Tensor], want: Sequence[Tensor], mask: Tensor) -> None:
    """Logits of real tokens are equal, forward by forward, and so are greedy choices."""
    start = 0
    for one, two in zip(got, want, strict=True):
        real = mask[:, start : start + one.shape[1]].bool()
        # Norms and RoPE of these models are float32 inside, so float32 is what two runs in float64 agree to.
        assert_close(one[real], two[real], dtype=torch.float32)
        assert torch.equal(one[real].argmax(-1), two[real].argmax(-1))
        start += one.shape[1]


def differs(got: Sequence[Tensor], other: Sequence[Tensor], mask: Tensor) -> bool:
    """True if the logits of some real token are visibly others, as a tested eviction makes them."""
    start = 0
    for one, two in zip(got, other, strict=True):
        real = mask[:, start : start + one.shape[1]].bool()
        if real.any() and float((one[real] - two[real]).abs().max()) > 1e-2:
            return True
        start += one.shape[1]
    return False


def assert_same_held(got: Sequence[Sequence[Tensor]], want: Sequence[Sequence[Tensor]]) -> None:
    """Exactly the same entries, after every forward, in every layer and head."""
    assert len(got) == len(want)
    for number, (one, two) in enumerate(zip(got, want, strict=True)):
        for layer, (a, b) in enumerate(zip(one, two, strict=True)):
            wrong = (a != b).nonzero().tolist()
            assert not wrong, f"after forward {number}, layer {layer}: {wrong} (sequence, head, token)"


def assert_same_stores(one: Cache, other: Cache) -> None:
    """Every layer that evicts holds the same entries, at the same positions."""
    for a, b in zip(one.state.ragged, other.state.ragged, strict=True):
        assert all(torch.equal(*pair) for pair in zip(a.store.flat(), b.store.flat(), strict=True))


def agree(
    model: PreTrainedModel,
    policy: Policy,
    scenario: Life,
    *,
    when: str = "chunk+decode",
    every: int = 3,
    naive: type[Naive] = Naive,
    gates=None,
    pinned=None,
    **budget,
) -> Naive:
    """The ragged cache does what the plain implementation does, forward by forward, and both evict."""
    gates = gates_of(model) if policy.learned and gates is None else gates
    how = {
        "when": when,
        "every": every,
        "seeds": SEEDS[: len(scenario.mask)],
        "gates": gates,
        "pinned": pinned,
    }
    plain = naive(model, policy, budget, **how)
    want = plain.run(scenario.chunks, scenario.mask, scenario.prompt)
    with retain.attach(model):
        cache = Cache(model, policy, **how, **budget)
        got, held = lived(model, cache, scenario)
    assert_same_held(held, plain.history)
    assert_same_logits(got, want, scenario.mask)
    assert cache.evictions > 1 - (when == "prefill")
    assert differs(got, eviction_free(model, scenario), scenario.mask)
    return plain
