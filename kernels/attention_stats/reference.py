"""Reference of attention statistics in plain PyTorch: the definition, the CPU path, the test oracle.

A block of whole rows is made at a time, a few queries of one KV head's whole group over the keys that they
can see, so small that it stays in cache from its product to its last reduction. Nothing grows with the
number of queries: beyond inputs and outputs, 64 MB are held, and the keys of one head in float32 if they come
in half precision. Results are float32 (float64 if the inputs are).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

# Inside the logarithm of an entropy, as CAKE's released code has it.
LOG_EPS = 1e-10
WANTED = ("max", "sum", "scatter", "entropy", "last", "lse", "plain")

# Floats of one block. A worker holds two (the second is for what cannot be done in place).
_BLOCK, _LARGEST_BLOCK = 1 << 20, 1 << 22
# Rows of a block below which its matrix product is bound by reading the keys, not by multiplying.
_ROWS = 64


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
    """Checked arguments of `attention_stats`, which explains them.

    Args:
        first: entry index of the first query.
        keys: first key that is asked about, and one past the last.
    """

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
    first: int
    keys: tuple[int, int]
    distance: int
    window: int | None
    soft_cap: float | None
    pool: Pool | None
    group: bool
    chunk: int | None

    @property
    def tensors(self) -> list[Tensor | None]:
        """In the order of the fields."""
        return [
            *(self.queries_BQSD, self.keys_BHTD, self.exists_BHT, self.asks_BS, self.place_BT),
            *(self.sinks_Q, self.log_weight_BHT, self.lse_BQS, self.least_BQS),
        ]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of all that is computed: float32, float64 if the inputs are."""
        return torch.promote_types(self.keys_BHTD.dtype, torch.float32)


def empty_outputs(call: Call, *, filled: bool = True) -> dict[str, Tensor]:
    """Each wanted statistic, with its value where no pair counts (`filled`), or not written at all."""
    B, Q, S, _ = call.queries_BQSD.shape
    heads = call.keys_BHTD.shape[1] if call.group else Q
    num_keys = call.keys[1] - call.keys[0]
    kept = {"last": (-1, torch.int64), "lse": (float("-inf"), call.dtype)}
    found = {}
    for name in call.wanted:
        value, dtype = kept.get(name, (0.0, call.dtype))
        shape = (B, Q, S) if name == "lse" else (B, heads, num_keys)
        found[name] = call.keys_BHTD.new_empty(shape, dtype=dtype)
        if filled:
            found[name].fill_(value)
    return found


@torch.no_grad()
def attention_stats(call: Call) -> dict[str, Tensor]:
    """Each wanted statistic, `[B, Q, K]`, or `[B, H, K]` if the group is reduced; `lse` `[B, Q, S]`."""
    found = empty_outputs(call)
    if call.lse_BQS is not None and "lse" in found:
        found["lse"].copy_(call.lse_BQS)
        if call.asks_BS is not None:
            found["lse"].masked_fill_(~call.asks_BS[:, None], float("-inf"))
    if call.keys_BHTD.device.type == "cpu":  # elsewhere, looking at a mask would wait for the device
        exists_BHT, asks_BS = (
            None if mask is None or bool(mask.all()) else mask for mask in (call.exists_BHT, call.asks_BS)
        )
        call = replace(call, exists_BHT=exists_BHT, asks_BS=asks_BS)
    holes = call.keys_BHTD.shape[2]
    if call.exists_BHT is not None and call.keys_BHTD.device.type == "cpu":
        holes -= int(call.exists_BHT.flatten(0, 1).all(0).flip(0).cumprod(0).sum())
    (B, S), H = call.queries_BQSD.shape[::2], call.keys_BHTD.shape[1]
    num_sequences, num_heads, chunk, workers, size = _plan(call)
    slabs = [
        (slice(b, b + num_sequences), slice(h, min(H, h + num_heads)))
        for b in range(0, B, num_sequences)
        for h in range(0, H, num_heads)
    ]

    def fold(part: list[tuple[slice, slice]]) -> None:
        buffers = [call.keys_BHTD.new_empty(size, dtype=call.dtype) for _ in range(2)]
        for batch, heads in part:
            slab = _slab(call, found, batch, heads, buffers, holes)
            for start in range(0, S, chunk):
                slab.at(start, min(S, start + chunk)).fold()
            slab.finish()
            del slab  # its float32 keys, before those of the next heads are made

    if workers == 1:
        fold(slabs)
    else:
        _in_threads(fold, [slabs[worker::workers] for worker in range(workers)])
    return found


def _in_threads(fold: Callable[[list], None], parts: list[list]) -> None:
    """Folds each part in a thread that computes alone: an operation that is cut over all cores waits for its
    slowest piece, and these are many small ones."""
    before, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def work(part: list) -> None:
        # A thread takes the process's default when it is first asked, and would then forget the number.
        torch.get_num_threads()
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            fold(part)

    try:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(work, parts))
    finally:
        # A thread's number is also the default of threads to come.
        torch.set_num_threads(before)


def _plan(call: Call) -> tuple[int, int, int, int, int]:
    """How many sequences, KV heads and queries a block takes, how many workers there are, and floats of a
    block."""
    (B, Q, S, D), (H, T) = call.queries_BQSD.shape, call.keys_BHTD.shape[1:3]
    G, columns, most = Q // H, T, S
    if call.window is not None and call.place_BT is None and call.pool is None:
        # More queries at once would make more products outside the window than inside.
        most = min(S, max(_ROWS, call.window))
        columns = min(T, call.window + (call.chunk or most))
    on_cpu = call.keys_BHTD.device.type == "cpu"
    threads = torch.get_num_threads() if on_cpu else 1
    # Heads are given to workers, if there are enough of them, and if a worker's block is not a few very long
    # rows.
    budget, workers = min(_BLOCK, _LARGEST_BLOCK // threads), min(threads, B * H)
    if 2 * workers <= threads or budget < min(_ROWS // 2, G * S) * columns:
        workers = 1
    if workers == 1:
        # Threads share a block: for many it is larger.
        shared = _BLOCK * (threads // 2 if on_cpu else 4)
        budget = min(_LARGEST_BLOCK, max(_BLOCK, shared, _ROWS * columns))
    chunk = min(S, call.chunk or max(1, min(most, budget // (G * columns))))
    a_head = columns * max(G * chunk, D)
    num_heads = max(1, min(H, budget // a_head, B * H // workers)) if chunk >= S else 1
    num_sequences = max(1, min(B, budget // (a_head * H), B // workers)) if num_heads == H else 1
    return num_sequences, num_heads, chunk, workers, num_sequences * num_heads * G * chunk * columns


def _slab(
    call: Call, found: dict[str, Tensor], batch: slice, heads: slice, buffers: list[Tensor], holes: int
) -> "_Block":
    """Some heads of some sequences: their part of the call, and of the results, before any query."""
    H = call.keys_BHTD.shape[1]
    G = call.queries_BQSD.shape[1] // H
    query_heads = slice(heads.start * G, heads.stop * G)

    def part(tensor: Tensor | None, *axes: slice) -> Tensor | None:
        return None if tensor is None else tensor[axes]

    def result(name: str, tensor: Tensor) -> Tensor:
        grouped = call.group and name != "lse"
        return (tensor if grouped else tensor.unflatten(1, (H, G)))[batch, heads]

    one_for_all = call.exists_BHT is not None and call.exists_BHT.shape[1] == 1
    sliced = replace(
        call,
        queries_BQSD=call.queries_BQSD[batch, query_heads],
        keys_BHTD=call.keys_BHTD[batch, heads].to(call.dtype),
        exists_BHT=part(call.exists_BHT, batch, slice(None) if one_for_all else heads),
        asks_BS=part(call.asks_BS, batch),
        place_BT=part(call.place_BT, batch),
        sinks_Q=part(call.sinks_Q, query_heads),
        log_weight_BHT=part(call.log_weight_BHT, batch, heads),
        lse_BQS=part(call.lse_BQS, batch, query_heads),
        least_BQS=part(call.least_BQS, batch, query_heads),
    )
    found = {name: result(name, tensor) for name, tensor in found.items()}
    (b, h), num_keys = sliced.keys_BHTD.shape[:2], call.keys[1] - call.keys[0]
    mean_BHGK = sliced.keys_BHTD.new_zeros((b, h, G, num_keys)) if "scatter" in found else None
    until_K = sliced.keys_BHTD.new_zeros(num_keys, dtype=torch.long)
    return _Block(sliced, found, buffers, holes, mean_BHGK, until_K, 0, 0, 0, 0)


@dataclass(frozen=True)
class _Block:
    """Rows of some heads: queries `start` to `stop` over the entries `low` to `high` that they reach.

    Args:
        call: the part of the call for these heads.
        found: the part of each statistic for these heads, `[B, H, G, K]`, or `[B, H, K]` for a group.
        buffers: two, in which blocks are made.
        holes: one past the last entry that some head does not hold.
        mean_BHGK: mean of the rows so far, for `scatter`.
        until_K: one past the last query that counted each key, for `scatter`.
    """

    call: Call
    found: dict[str, Tensor]
    buffers: list[Tensor]
    holes: int
    mean_BHGK: Tensor | None
    until_K: Tensor
    start: int
    stop: int
    low: int
    high: int

    def at(self, start: int, stop: int) -> "_Block":
        """The same heads with other queries, and the entries that any of them needs."""
        call, T = self.call, self.call.keys_BHTD.shape[2]
        end = call.first + stop
        low, high = 0, min(T, end)
        if call.pool is not None:
            return replace(self, start=start, stop=stop, low=0, high=T)
        if call.window is not None and call.place_BT is None:
            low = max(low, call.first + start - call.window + 1)
        if call.lse_BQS is not None:
            low = max(low, call.keys[0])
            high = min(high, call.keys[1], end - call.distance)
        return replace(self, start=start, stop=stop, low=low, high=high)

    def fold(self) -> None:
        """Count the queries."""
        if self.low >= self.high:
            return
        probs_BHGsK = self._probs()
        if "plain" in self.found:
            self._add("plain", slice(None), probs_BHGsK[..., slice(*self.call.keys)].sum(3))
        if self.call.pool is not None:
            probs_BHGsK = self._pooled(probs_BHGsK, self.call.pool)
        self._count(probs_BHGsK)

    def finish(self) -> None:
        """Queries behind those that counted a key pay it nothing: the rest of `scatter`."""
        if self.mean_BHGK is not None:
            S = self.call.queries_BQSD.shape[2]
            behind_K = (self.until_K * (S - self.until_K)).to(self.call.dtype) / S
            self._add("scatter", slice(None), self.mean_BHGK.square_().mul_(behind_K))

    def _other(self, block: Tensor) -> Tensor:
        """A tensor of a block's shape in the buffer that does not hold the block."""
        first, second = self.buffers
        held = block.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        return (second if held else first)[: block.numel()].view(block.shape)

    def _grouped(self, tensor_BQ: Tensor) -> Tensor:
        return tensor_BQ.unflatten(1, (self.call.keys_BHTD.shape[1], -1))

    def _query_s1(self) -> Tensor:
        """Entry index of each query."""
        first = self.call.first
        return torch.arange(first + self.start, first + self.stop, device=self.until_K.device)[:, None]

    def _entries(self, low: int, high: int) -> Tensor:
        return torch.arange(low, high, device=self.until_K.device)

    def _probs(self) -> Tensor:
        """Attention of the queries over the keys in reach, `[B, H, G, s, K]`."""
        call = self.call
        queries = self._grouped(call.queries_BQSD)[:, :, :, self.start : self.stop]
        b, h, G, s, D = queries.shape
        rows = (queries.to(call.dtype) * call.scaling).reshape(b * h, G * s, D)
        keys = call.keys_BHTD[:, :, self.low : self.high].flatten(0, 1)
        n = self.high - self.low
        logits = self.buffers[0][: b * h * G * s * n].view(b * h, G * s, n)
        logits = torch.bmm(rows, keys.transpose(1, 2), out=logits).view(b, h, G, s, n)
        if call.soft_cap is not None:
            logits.div_(call.soft_cap).tanh_().mul_(call.soft_cap)
        if call.log_weight_BHT is not None:
            logits.add_(call.log_weight_BHT[:, :, None, None, self.low : self.high])
        self._hide(logits)
        on_cpu = logits.device.type == "cpu"
        if call.lse_BQS is not None:
            lse = call.lse_BQS[:, :, self.start : self.stop].to(call.dtype)
            # A row that sees nothing pays nothing.
            lse = lse.masked_fill(lse == float("-inf"), float("inf"))
            # No more than 1, whatever digits a log-sum-exp is short of.
            probs = logits.sub_(self._grouped(lse)[..., None]).clamp_max_(0.0).exp_()
        elif call.sinks_Q is None and "lse" not in self.found and (on_cpu or call.exists_BHT is None):
            probs = torch.softmax(logits, -1, out=self._other(logits))
            if call.exists_BHT is not None and bool((blank := probs[..., :1].isnan()).any()):
                # A row that sees nothing is NaN there; most often there is none.
                probs.masked_fill_(blank & (logits.amax(-1, keepdim=True) == float("-inf")), 0.0)
        else:
            probs = self._softmax(logits)
        if call.asks_BS is not None:
            probs.masked_fill_(~call.asks_BS[:, None, None, self.start : self.stop, None], 0.0)
        return probs

    def _softmax(self, logits: Tensor) -> Tensor:
        """In place, of rows that may see nothing or have a sink; the log-sum-exp is kept if it is wanted."""
        call = self.call
        most = logits.amax(-1, keepdim=True)
        if call.sinks_Q is not None:
            sink = call.sinks_Q.to(call.dtype).view(1, *logits.shape[1:3], 1, 1)
            most = torch.maximum(most, sink)
        most.clamp_min_(torch.finfo(call.dtype).min)
        probs = logits.sub_(most).exp_()
        total = probs.sum(-1, keepdim=True)
        if call.sinks_Q is not None:
            total += torch.exp(sink - most)
        if "lse" in self.found:
            lse = (most + total.log())[..., 0]
            if call.asks_BS is not None:
                lse.masked_fill_(~call.asks_BS[:, None, None, self.start : self.stop], float("-inf"))
            self.found["lse"][..., self.start : self.stop] = lse
        return probs.mul_(torch.where(total > 0, 1 / total, 0.0))

    def _hide(self, logits: Tensor) -> None:
        """Put -inf where a query does not see a key."""
        call, low, high, never = self.call, self.low, self.high, float("-inf")
        # Up to the first query's entry, causality hides nothing.
        after = max(low, call.first + self.start + 1)
        if after < high:
            logits[..., after - low :].masked_fill_(self._entries(after, high) > self._query_s1(), never)
        if call.window is not None and call.place_BT is None:
            # From the last query's reach on, the window hides nothing.
            until = min(high, call.first + self.stop - call.window)
            if low < until:
                hidden = self._entries(low, until) <= self._query_s1() - call.window
                logits[..., : until - low].masked_fill_(hidden, never)
        elif call.window is not None:
            logits.masked_fill_(~self._near(low, high)[:, None, None], never)
        until = min(high, self.holes)
        if call.exists_BHT is not None and low < until:
            logits[..., : until - low].masked_fill_(~call.exists_BHT[:, :, None, None, low:until], never)

    def _near(self, low: int, high: int) -> Tensor:
        """Which entries a window counted in places reaches back to (later ones too), `[B, s, K]`."""
        call = self.call
        assert call.place_BT is not None and call.window is not None
        query_Bs = call.place_BT[:, call.first + self.start : call.first + self.stop]
        return call.place_BT[:, None, low:high] > query_Bs[..., None] - call.window

    def _pooled(self, probs: Tensor, pool: Pool) -> Tensor:
        """Rows smoothed along the entries, on both sides of the split apart."""
        exists, place = self.call.exists_BHT, self.call.place_BT
        pooled = self._other(probs).zero_()
        for side in (slice(0, pool.split), slice(pool.split, None)):
            before, after = probs[..., side], pooled[..., side]
            if not before.shape[-1]:
                continue
            if place is not None:
                _pool_places_(after, before, pool, place[:, side])
            elif pool.kind == "max":
                as_rows = before.reshape(-1, 1, before.shape[-1])
                after.copy_(max_pool1d(as_rows, pool.size, 1, pool.size // 2).view(before.shape))
            else:
                # avg_pool1d makes these sums in the same order, several times slower.
                for here, near in _shifted(before.shape[-1], pool.size // 2):
                    after[..., here] += before[..., near]
            if pool.kind == "avg":
                after.div_(pool.size)
            if exists is not None:
                # An entry that nobody holds gets nothing of its neighbours.
                after.masked_fill_(~exists[:, :, None, None, side], 0.0)
            if pool.keep_mass:
                mass = after.sum(-1, keepdim=True).clamp_min(torch.finfo(after.dtype).tiny)
                after.mul_(before.sum(-1, keepdim=True) / mass)
        return pooled

    def _count(self, probs: Tensor) -> None:
        """Fold rows `[B, H, G, s, K]` into the statistics."""
        call, found = self.call, self.found
        first, last = call.keys
        if call.pool is None:
            last = min(last, call.first + self.stop - call.distance)
        bottom, top = max(self.low, first), min(self.high, last)
        if bottom >= top:
            return
        probs = probs[..., bottom - self.low : top - self.low]
        # Up to here every query of the block is far enough away.
        far = max(bottom, call.first + self.start - call.distance + 1)
        if call.distance and far < top:
            near_sK = self._entries(far, top) > self._query_s1() - call.distance
            probs[..., far - bottom :].masked_fill_(near_sK, 0.0)
        columns = slice(bottom - first, top - first)
        if "last" in found:
            part = found["last"][..., columns]
            torch.maximum(part, self._last(probs, bottom, top), out=part)
        if "max" in found:
            part = found["max"][..., columns]
            torch.maximum(part, self._reduce(probs, "max"), out=part)
        if "sum" in found:
            found["sum"][..., columns] += self._reduce(probs, "sum")
        if "entropy" in found:
            terms = torch.add(probs, LOG_EPS, out=self._other(probs)).log_().mul_(probs)
            found["entropy"][..., columns] -= self._reduce(terms, "sum")
        if self.mean_BHGK is not None:
            self._scatter(self.mean_BHGK[..., columns], probs, columns)

    def _reduce(self, values_BHGsK: Tensor, how: str) -> Tensor:
        """Over the queries, and over the group if that is asked."""
        values = values_BHGsK.flatten(2, 3) if self.call.group else values_BHGsK
        axis = 2 if self.call.group else 3
        return values.amax(axis) if how == "max" else values.sum(axis)

    def _add(self, name: str, columns: slice, sums_BHGK: Tensor) -> None:
        """Add sums over queries to a statistic, over the group too if that is asked."""
        self.found[name][..., columns].add_(sums_BHGK.sum(2) if self.call.group else sums_BHGK)

    def _scatter(self, mean: Tensor, probs: Tensor, columns: slice) -> None:
        """Fold rows into sums of squared distances from a mean that moves as queries come.

        As Chan, Golub and LeVeque (1979) put two samples together. Earlier queries that did not count these
        keys have left the mean at 0, which is what they paid.
        """
        num = self.stop - self.start
        moved = probs.mean(3)
        apart = torch.sub(probs, moved[:, :, :, None], out=self._other(probs)).square_().sum(3)
        moved -= mean
        apart += moved.square() * (self.start * num / self.stop)
        mean += moved * (num / self.stop)
        self.until_K[columns] = self.stop
        self._add("scatter", columns, apart)

    def _last(self, probs: Tensor, bottom: int, top: int) -> Tensor:
        """Entry index of the last of the queries that accesses each key; -1 for none."""
        call = self.call
        assert call.least_BQS is not None
        least = self._grouped(call.least_BQS[:, :, self.start : self.stop]).to(call.dtype)
        accessed = probs >= least[..., None]
        # Where nothing is asked for, zeros are enough: only of entries that are seen.
        query_s1, entry_K = self._query_s1(), self._entries(bottom, top)
        accessed &= entry_K <= query_s1 - call.distance
        if call.window is not None and call.place_BT is None:
            accessed &= entry_K > query_s1 - call.window
        elif call.window is not None:
            accessed &= self._near(bottom, top)[:, None, None]
        if call.exists_BHT is not None:
            accessed &= call.exists_BHT[:, :, None, None, bottom:top]
        if call.asks_BS is not None:
            accessed &= call.asks_BS[:, None, None, self.start : self.stop, None]
        # Counted from 1 within the block, exact in floats.
        turn_s1 = torch.arange(1, self.stop - self.start + 1, device=probs.device, dtype=call.dtype)[:, None]
        turn = self._reduce(torch.mul(accessed, turn_s1, out=self._other(probs)), "max").long()
        return torch.where(turn > 0, turn + (call.first + self.start - 1), -1)


def _pool_places_(pooled: Tensor, part: Tensor, pool: Pool, place_BT: Tensor) -> None:
    """Sum up, or take the largest, of what lies at most `size // 2` places away."""
    reach = pool.size // 2
    # Places ascend, so that nothing near is more columns away than places.
    for here, other in _shifted(part.shape[-1], reach):
        near = ((place_BT[:, other] - place_BT[:, here]).abs() <= reach)[:, None, None, None].to(part.dtype)
        if pool.kind == "avg":
            pooled[..., here].addcmul_(part[..., other], near)
        else:
            torch.maximum(pooled[..., here], part[..., other] * near, out=pooled[..., here])


def _shifted(num_entries: int, reach: int) -> Iterator[tuple[slice, slice]]:
    """Entries that have a neighbour so many columns on, and those neighbours, for -reach, ..., reach."""
    for shift in range(-reach, reach + 1):
        first, last = max(0, -shift), min(num_entries, num_entries - shift)
        if first < last:
            yield slice(first, last), slice(first + shift, last + shift)
