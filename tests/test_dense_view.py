"""Columns of ragged rows, against loops over tokens, heads and entries."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retain.attention.dense_view import DenseView, dense_view


@dataclass(frozen=True)
class Store:
    """Ragged rows made by hand: entries lie anywhere in a store, and each knows only its position."""

    positions_C: Tensor
    index_N: Tensor
    rows_N: Tensor
    num_heads: int

    def columns(self, positions_BT: Tensor, valid_BT: Tensor, num_queries: int) -> DenseView:
        return dense_view(
            self.positions_C,
            self.index_N,
            self.rows_N,
            self.num_heads,
            positions_BT=positions_BT,
            valid_BT=valid_BT,
            num_queries=num_queries,
        )


def make_store(positions_BT: Tensor, held_BHT: Tensor, seed: int, slack: int = 5) -> Store:
    rows_N, token_N = held_BHT.flatten(0, 1).nonzero(as_tuple=True)
    num_heads = held_BHT.shape[1]
    room = len(rows_N) + slack
    index_N = torch.randperm(room, generator=torch.Generator().manual_seed(seed))[: len(rows_N)]
    positions_C = torch.full((room,), 10**6)
    positions_C[index_N] = positions_BT[rows_N // num_heads, token_N]
    return Store(positions_C, index_N, rows_N, num_heads)


def draw_case(seed: int, B: int, H: int, seen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, padding (between tokens too) and who holds what."""
    draw = torch.Generator().manual_seed(seed)
    valid_BT = torch.rand(B, seen, generator=draw) < torch.rand(B, 1, generator=draw) * 1.5
    gaps_BT = torch.randint(1, 4, (B, seen), generator=draw)
    positions_BT = (gaps_BT * valid_BT).cumsum(-1) + 3
    positions_BT = positions_BT.masked_fill(~valid_BT, int(torch.randint(0, 9, (1,), generator=draw)))
    held_BHT = torch.rand(B, H, seen, generator=draw) < torch.rand(B, H, 1, generator=draw) - 0.2
    return positions_BT, valid_BT, held_BHT & valid_BT[:, None]


CASES = given(
    seed=st.integers(0, 10**6), B=st.integers(1, 4), H=st.sampled_from([1, 3]), seen=st.integers(1, 17)
)


@settings(max_examples=80, deadline=None, derandomize=True)
@CASES
def test_columns_are_the_union_of_what_heads_hold_and_what_is_asked(seed, B, H, seen):
    positions_BT, valid_BT, held_BHT = draw_case(seed, B, H, seen)
    asked = seed % (seen + 2)
    first = seen - asked
    store = make_store(positions_BT, held_BHT, seed)
    columns = store.columns(positions_BT, valid_BT, asked)
    small = Store(store.positions_C.int(), store.index_N.int(), store.rows_N.int(), H)
    for name, field in vars(columns).items():  # indices of 32 bits
        if name != "entries":
            assert torch.equal(getattr(small.columns(positions_BT.int(), valid_BT, asked), name), field), name
    tokens = []
    for b in range(B):
        each = [t for t in range(seen) if valid_BT[b, t]]
        tokens.append([t for t in each if t >= first or held_BHT[b, :, t].any()])
    T = max(len(each) for each in tokens)
    assert columns.held_BHT.shape == (B, H, T)
    entries = {}
    for n, (row, index) in enumerate(zip(store.rows_N.tolist(), store.index_N.tolist(), strict=True)):
        t = held_BHT.flatten(0, 1)[row].nonzero().flatten()[store.rows_N[:n].eq(row).sum()]
        entries[row, int(t)] = (n, index)
    for b, each in enumerate(tokens):
        pad = T - len(each)
        assert columns.valid_BT[b].tolist() == [False] * pad + [True] * len(each)
        assert columns.token_BT[b].tolist() == [0] * pad + each
        assert columns.queried_BT[b].tolist() == [False] * pad + [t >= first for t in each]
        for i, t in enumerate(each, pad):
            assert columns.positions_BT[b, i] == positions_BT[b, t]
            assert columns.place_BT[b, i] == valid_BT[b, :t].sum()
            for h in range(H):
                assert columns.held_BHT[b, h, i] == held_BHT[b, h, t]
                if held_BHT[b, h, t]:
                    n, index = entries[b * H + h, t]
                    assert (columns.entries[1][n], columns.index_BHT[b, h, i]) == (i, index)
    assert not (columns.held_BHT & ~columns.valid_BT[:, None]).any()
    assert (columns.index_BHT[~columns.held_BHT] == 0).all()
