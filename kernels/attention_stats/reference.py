"""Reference of attention statistics in plain PyTorch: the definition, the CPU path, the test oracle.

A block of whole rows is made at a time, a few queries of one KV head's whole group over the keys that they
can see, so small that it stays in cache from its product to its last reduction. Nothing grows with the
number of queries, and beyond inputs and outputs fewer than 64 MB are held, at any length up to some millions
of entries (where one row alone fills the budget). Results are float32 (float64 if the inputs are).
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

# Inside the logarithm of an entropy, as CAKE's released code has it.
LOG_EPS = 1e-10
WANTED = ("max", "sum", "scatter", "entropy", "last", "lse", "plain")

# Floats of one block. There are two (the second is for what cannot be done in place), and a tile of keys.
_BLOCK, _LARGEST_BLOCK = 1 << 20, 1 << 22
# Rows of a block below which its matrix product is bound by reading the keys, not by multiplying.
_ROWS = 64
_KEY_TILE = 1 << 21


@dataclass(frozen=True)
class Pool:
    """Rows smoothed along the entries, as observation windows do, before anything is counted.

    Args:
        kind: `avg` (the sum over the places at most `size // 2` away, over `size`) or `max`.
        size: places, odd.
        split: entries before it and entries from it on are pooled apart.
        keep_mass: whether each pooled row is scaled, on each side of the split, to the mass that it had
            before.
    """

    kind: str
    size: int
    split: int
    keep_mass: bool = False


@dataclass(frozen=True)
class Call:
    """Arguments of `attention_stats`, which explains them; `entries` and `distance` are at most T."""

    queries_BQSD: Tensor
    keys_BHTD: Tensor
    exists_BHT: Tensor | None
    asks_BS: Tensor | None
    place_BT: Tensor | None
    sinks_Q: Tensor | None
    log_weight_BHT: Tensor | None
    lse_BQS: Tensor | None
    least_BQS: Tensor | None
    scaling: float
    wanted: tuple[str, ...]
    entries: int
    distance: int
    soft_cap: float | None
    pool: Pool | None
    group: bool

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all that is computed: float32, float64 if the inputs are."""
        return torch.promote_types(self.keys_BHTD.dtype, torch.float32)

    @property
    def first(self) -> int:
        """Entry index of the first query."""
        return self.keys_BHTD.shape[2] - self.queries_BQSD.shape[2]


@torch.no_grad()
def attention_stats(call: Call) -> dict[str, Tensor]:
    """Each wanted statistic, `[B, Q, K]`, or `[B, H, K]` if the group is reduced; `lse` `[B, Q, S]`."""
    walk = _Walk(call)
    slabs = list(walk.slabs())
    if walk.workers > 1:
        # No two write the same numbers.
        walks = [walk, *(walk.copied() for _ in range(walk.workers - 1))]
        _in_threads([(other, slabs[place :: len(walks)]) for place, other in enumerate(walks)])
        return walk.found
    for rows in slabs:
        walk.fold(rows)
    return walk.found


def _in_threads(parts: "list[tuple[_Walk, list[_Rows]]]") -> None:
    """Folds each part in a thread that computes alone: an operation that is cut over all cores waits for its
    slowest piece, and these are many small ones."""
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def work(part: "tuple[_Walk, list[_Rows]]") -> None:
        # A thread takes the process's default when it is first asked, and would then forget the number.
        torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            for rows in part[1]:
                part[0].fold(rows)

    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(work, parts))
    finally:
        # A thread's number is also the default of threads to come.
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Rows:
    """Some sequences, some KV heads of them, and the query heads of those."""

    batch: slice
    heads: slice
    query_heads: slice

    def of(self, field_BH: Tensor) -> Tensor:
        """Their part of what has a batch and a head axis, where one head may stand for all."""
        return field_BH[self.batch, slice(0, 1) if field_BH.shape[1] == 1 else self.heads]


class _Walk:
    """A call, while its blocks are made one after another in the same memory."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.B, self.Q, self.S, self.D = call.queries_BQSD.shape
        self.H, self.T = call.keys_BHTD.shape[1:3]
        self.G = self.Q // self.H
        self.device = call.keys_BHTD.device
        self.on_cpu = self.device.type == "cpu"
        # Each with its value where no pair counts.
        kept = {"last": (-1, torch.int64), "lse": (float("-inf"), call.dtype)}
        self.found = {}
        for name in call.wanted:
            value, dtype = kept.get(name, (0.0, call.dtype))
            heads = self.H if call.group and name != "lse" else self.Q
            size = self.S if name == "lse" else call.entries
            self.found[name] = call.keys_BHTD.new_full((self.B, heads, size), value, dtype=dtype)
        self._plan()
        self._look()
        self.entry_T = torch.arange(self.T, device=self.device)
        self.query_S = self.entry_T[call.first :]

    def _plan(self) -> None:
        """Sets how many queries, heads and sequences a block takes, and allocates it."""
        call, B, H, S, columns = self.call, self.B, self.H, self.S, self.T
        threads = torch.get_num_threads() if self.on_cpu else 1
        apiece = min(_BLOCK, _LARGEST_BLOCK // threads)
        # Heads are given to workers, if there are enough of them, and if a block that is a worker's own is
        # not a few very long rows.
        self.workers = min(threads, B * H)
        if 2 * self.workers <= threads or apiece < min(_ROWS // 2, self.G * S) * columns:
            self.workers = 1
        budget = apiece
        if self.workers == 1:
            # Threads share a block: for many it is larger.
            shared = _BLOCK * (threads // 2 if self.on_cpu else 4)
            budget = min(_LARGEST_BLOCK, max(_BLOCK, shared, _ROWS * columns))
        self.chunk = min(S, max(1, budget // (self.G * columns)))
        a_head = columns * max(self.G * self.chunk, self.D)
        whole = self.chunk >= S
        self.heads = max(1, min(H, budget // a_head, B * H // self.workers)) if whole else 1
        self.batch = max(1, min(B, budget // (a_head * H), B // self.workers)) if self.heads == H else 1
        self._size = self.batch * self.heads * self.G * self.chunk * columns
        self._make_room()
        keys = call.keys_BHTD
        # What a matrix product takes as it lies; the rest is copied a tile at a time.
        self.keys_as_they_are = keys.dtype == call.dtype and keys.stride(3) == 1 and keys.stride(2) >= self.D
        self.tile = max(1, min(self.T, _KEY_TILE // (self.D * self.workers)))

    def _make_room(self) -> None:
        keys = self.call.keys_BHTD
        self.block, self.scratch = (keys.new_empty(self._size, dtype=self.call.dtype) for _ in range(2))

    def copied(self) -> "_Walk":
        """The same call and results, with other blocks."""
        other = copy(self)
        other._make_room()
        return other

    def _look(self) -> None:
        """Masks that can be left out, where looking costs nothing: a GPU would be waited for."""
        call = self.call
        # Columns up to the last one that somebody does not hold.
        self.holes = 0 if call.exists_BHT is None else self.T
        if self.on_cpu and call.exists_BHT is not None:
            whole_T = call.exists_BHT.flatten(0, 1).all(0)
            self.holes = self.T - int(whole_T.flip(0).cumprod(0).sum())
        there = call.asks_BS is None or (self.on_cpu and bool(call.asks_BS.all()))
        self.asks_BS = None if there else call.asks_BS

    def slabs(self) -> Iterator[_Rows]:
        """Sequences and heads whose blocks are made together."""
        for b in range(0, self.B, self.batch):
            for h in range(0, self.H, self.heads):
                stop = min(self.H, h + self.heads)
                query_heads = slice(h * self.G, stop * self.G)
                yield _Rows(slice(b, min(self.B, b + self.batch)), slice(h, stop), query_heads)

    def fold(self, rows: _Rows) -> None:
        """Count the queries of some heads, a few at a time."""
        keys = self.call.keys_BHTD[rows.batch, rows.heads]
        copied = None
        if not self.keys_as_they_are and self.tile == self.T:
            copied = keys.to(self.call.dtype, memory_format=torch.contiguous_format, copy=True)
        if "scatter" in self.found:
            self.mean_BHGK = self.block.new_zeros((*keys.shape[:2], self.G, self.call.entries))
        for start in range(0, self.S, self.chunk):
            stop = min(self.S, start + self.chunk)
            high = self._reach(stop)
            if high > 0:
                probs_BHGsK = self._probs(rows, keys if copied is None else copied, start, stop, high)
                if "plain" in self.found:
                    paid_BHGK = probs_BHGsK[..., : self.call.entries].sum(3)
                    self._part("plain", rows, None).add_(paid_BHGK.sum(2) if self.call.group else paid_BHGK)
                if self.call.pool is not None:
                    probs_BHGsK = self._pooled(rows, probs_BHGsK)
                self._count(rows, probs_BHGsK, start, stop)

    def _reach(self, stop: int) -> int:
        """Number of first keys that the queries before `stop` need."""
        call = self.call
        if call.pool is not None:
            return self.T
        end = call.first + stop
        return end if call.lse_BQS is None else min(end - call.distance, call.entries)

    def _logits(self, rows: _Rows, keys: Tensor, start: int, stop: int, n: int) -> Tensor:
        """Scaled products of the queries with the first n keys, `[B, H, G, s, n]`, in `block`."""
        call, dtype = self.call, self.call.dtype
        queries = call.queries_BQSD.unflatten(1, (self.H, self.G))[rows.batch, rows.heads, :, start:stop]
        b, h, G, s, D = queries.shape
        queries = (queries.to(dtype) * call.scaling).reshape(b * h, G * s, D)
        logits = self.block[: b * h * G * s * n].view(b * h, G * s, n)
        keys = keys[:, :, :n]
        if self.keys_as_they_are or self.tile == self.T:
            torch.bmm(queries, keys.flatten(0, 1).transpose(1, 2), out=logits)
        else:
            for row, head in enumerate(keys.flatten(0, 1)):
                for at in range(0, n, self.tile):
                    part = head[at : at + self.tile].to(dtype)
                    torch.mm(queries[row], part.t(), out=logits[row, :, at : at + self.tile])
        return logits.view(b, h, G, s, n)

    def _probs(self, rows: _Rows, keys: Tensor, start: int, stop: int, high: int) -> Tensor:
        """Attention of the queries over the first keys, `[B, H, G, s, high]`, in `block` or in `scratch`."""
        call = self.call
        logits = self._logits(rows, keys, start, stop, high)
        if call.soft_cap is not None:
            logits.div_(call.soft_cap).tanh_().mul_(call.soft_cap)
        if call.log_weight_BHT is not None:
            logits.add_(rows.of(call.log_weight_BHT)[:, :, None, None, :high])
        self._hide(rows, logits, start, stop)
        if call.lse_BQS is not None:
            lse = call.lse_BQS[rows.batch, rows.query_heads, start:stop].to(call.dtype)
            # A row that sees nothing pays nothing.
            lse = lse.masked_fill(lse == float("-inf"), float("inf"))
            # No more than 1, whatever digits a log-sum-exp is short of.
            probs = logits.sub_(lse.unflatten(1, (-1, self.G))[..., None]).clamp_max_(0.0).exp_()
        elif call.sinks_Q is None and "lse" not in call.wanted and (self.on_cpu or not self.holes):
            probs = torch.softmax(logits, -1, out=self.scratch[: logits.numel()].view(logits.shape))
            if self.holes:
                # Of a row that sees nothing, all is NaN; most often there is none.
                blank = probs[..., :1].isnan()
                if bool(blank.any()):
                    probs.masked_fill_(blank & (logits.amax(-1, keepdim=True) == float("-inf")), 0.0)
        else:
            probs = self._softmax(rows, logits, start, stop)
        if self.asks_BS is not None:
            probs.masked_fill_(~self.asks_BS[rows.batch, None, None, start:stop, None], 0.0)
        return probs

    def _softmax(self, rows: _Rows, logits: Tensor, start: int, stop: int) -> Tensor:
        """In place, of rows that may see nothing or have a sink; the log-sum-exp is kept if it is wanted."""
        call = self.call
        most = logits.amax(-1, keepdim=True)
        if call.sinks_Q is not None:
            sink = call.sinks_Q[rows.query_heads].to(call.dtype).view(1, -1, self.G, 1, 1)
            most = torch.maximum(most, sink)
        most.clamp_min_(torch.finfo(call.dtype).min)
        probs = logits.sub_(most).exp_()
        total = probs.sum(-1, keepdim=True)
        if call.sinks_Q is not None:
            total += torch.exp(sink - most)
        if "lse" in self.found:
            lse = (most + total.log())[..., 0].flatten(1, 2)
            if self.asks_BS is not None:
                lse.masked_fill_(~self.asks_BS[rows.batch, None, start:stop], float("-inf"))
            self.found["lse"][rows.batch, rows.query_heads, start:stop] = lse
        return probs.mul_(torch.where(total > 0, 1 / total, 0.0))

    def _hide(self, rows: _Rows, logits: Tensor, start: int, stop: int) -> None:
        """Put -inf where a query does not see a key."""
        call, never, high = self.call, float("-inf"), logits.shape[-1]
        # Up to the first query's own entry, causality hides nothing.
        after = call.first + start + 1
        if after < high:
            later_sK = self.entry_T[after:high] > self.query_S[start:stop, None]
            logits[..., after:].masked_fill_(later_sK, never)
        if call.exists_BHT is not None and self.holes:
            exists_BHK = rows.of(call.exists_BHT)[..., : min(high, self.holes)]
            logits[..., : self.holes].masked_fill_(~exists_BHK[:, :, None, None], never)

    def _pooled(self, rows: _Rows, probs: Tensor) -> Tensor:
        """Rows smoothed along the entries, on both sides of the split apart, in the other buffer."""
        pool = self.call.pool
        assert pool is not None
        other = self.block if probs.data_ptr() == self.scratch.data_ptr() else self.scratch
        pooled = other[: probs.numel()].view(probs.shape).zero_()
        exists_BHT = None if self.call.exists_BHT is None else rows.of(self.call.exists_BHT)
        for side in (slice(0, pool.split), slice(pool.split, None)):
            before, after = probs[..., side], pooled[..., side]
            place_BT = None if self.call.place_BT is None else self.call.place_BT[rows.batch, side]
            pool_(after, before, pool.kind, pool.size, place_BT)
            if exists_BHT is not None and self.holes:
                # What nobody holds gets nothing of its neighbours.
                after.masked_fill_(~exists_BHT[:, :, None, None, side], 0.0)
            if pool.keep_mass:
                mass = after.sum(-1, keepdim=True).clamp_min(torch.finfo(after.dtype).tiny)
                after.mul_(before.sum(-1, keepdim=True) / mass)
        return pooled

    def _count(self, rows: _Rows, probs: Tensor, start: int, stop: int) -> None:
        """Fold a block `[B, H, G, s, K]` of rows into the statistics; the block is used up."""
        call = self.call
        top = min(probs.shape[-1], call.entries)
        if call.pool is None:
            top = min(top, call.first + stop - call.distance)
        if top <= 0:
            return
        probs = probs[..., :top]
        # Up to here every query of the block is far enough away.
        far = max(0, call.first + start - call.distance + 1)
        if call.distance and far < top:
            near_sK = self.entry_T[far:top] > self.query_S[start:stop, None] - call.distance
            probs[..., far:].masked_fill_(near_sK, 0.0)
        other = self.block if probs.untyped_storage().data_ptr() != self.block.data_ptr() else self.scratch
        spare = other[: probs.numel()].view(probs.shape)
        elsewhere = ("lse", "plain")
        found = {name: self._part(name, rows, top) for name in call.wanted if name not in elsewhere}
        if "last" in found:
            accessed = self._last(rows, probs, spare, start, stop)
            torch.maximum(found["last"], accessed, out=found["last"])
        if "max" in found:
            torch.maximum(found["max"], self._reduce(probs, "max"), out=found["max"])
        if "sum" in found:
            found["sum"] += self._reduce(probs, "sum")
        if "entropy" in found:
            found["entropy"] -= self._reduce(torch.add(probs, LOG_EPS, out=spare).log_().mul_(probs), "sum")
        if "scatter" in found:
            apart = self._scatter(probs, spare, start, stop)
            found["scatter"] += apart.sum(2) if call.group else apart

    def _part(self, name: str, rows: _Rows, top: int | None) -> Tensor:
        """A statistic of these heads and first keys, `[B, H, G, K]`, or `[B, H, K]` for a group."""
        if self.call.group:
            return self.found[name][rows.batch, rows.heads, :top]
        return self.found[name].unflatten(1, (self.H, self.G))[rows.batch, rows.heads, :, :top]

    def _reduce(self, values_BHGsK: Tensor, how: str) -> Tensor:
        """Over the queries, and over the group if that is asked."""
        values = values_BHGsK.flatten(2, 3) if self.call.group else values_BHGsK
        axis = 2 if self.call.group else 3
        return values.amax(axis) if how == "max" else values.sum(axis)

    def _scatter(self, probs: Tensor, spare: Tensor, start: int, stop: int) -> Tensor:
        """A block's part of the sums of squared distances from a mean that moves as queries come.

        As Chan, Golub and LeVeque (1979) put two samples together. Earlier queries that did not count these
        keys have left the mean at 0, which is what they paid.
        """
        mean, num = self.mean_BHGK[..., : probs.shape[-1]], stop - start
        moved = probs.mean(3)
        apart = torch.sub(probs, moved[:, :, :, None], out=spare).square_().sum(3)
        moved -= mean
        apart += moved.square() * (start * num / stop)
        mean += moved * (num / stop)
        return apart

    def _last(self, rows: _Rows, probs: Tensor, spare: Tensor, start: int, stop: int) -> Tensor:
        """Entry index of the last of the queries that accesses each key; -1 for none."""
        call = self.call
        assert call.least_BQS is not None
        least = (
            call.least_BQS[rows.batch, rows.query_heads, start:stop].unflatten(1, (-1, self.G)).to(call.dtype)
        )
        accessed = probs >= least[..., None]
        # Where nothing is asked for, zeros are enough: only of what is seen.
        top = probs.shape[-1]
        accessed &= self.entry_T[:top] <= self.query_S[start:stop, None] - call.distance
        if call.exists_BHT is not None:
            accessed &= rows.of(call.exists_BHT)[:, :, None, None, :top]
        if self.asks_BS is not None:
            accessed &= self.asks_BS[rows.batch, None, None, start:stop, None]
        # Counted from 1 within the block, exact in floats.
        turn_s1 = torch.arange(1, stop - start + 1, device=self.device, dtype=call.dtype)[:, None]
        turn = self._reduce(torch.mul(accessed, turn_s1, out=spare), "max").long()
        return torch.where(turn > 0, turn + (call.first + start - 1), -1)


def pool_(pooled: Tensor, values: Tensor, kind: str, size: int, place_BT: Tensor | None) -> None:
    """Put what lies at most `size // 2` places away in place of zeros: its sum over `size`, or the largest.

    Args:
        pooled: zeros, `[B, ..., T]`.
        values: not negative.
        place_BT: ascending; None: no place is missing.
    """
    num_entries, reach = values.shape[-1], size // 2
    # Places ascend, so that nothing near is more columns away than places.
    for shift in range(-min(reach, num_entries), min(reach, num_entries) + 1):
        here = slice(max(0, -shift), min(num_entries, num_entries - shift))
        other = slice(here.start + shift, here.stop + shift)
        near = values[..., other]
        if place_BT is not None:
            place = place_BT.unflatten(0, (-1, *[1] * (values.dim() - 2)))
            near = near * ((place[..., other] - place[..., here]).abs() <= reach)
        if kind == "avg":
            pooled[..., here] += near
        else:
            torch.maximum(pooled[..., here], near, out=pooled[..., here])
    if kind == "avg":
        pooled.div_(size)
