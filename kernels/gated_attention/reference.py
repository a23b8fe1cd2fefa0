"""Reference of gated attention in plain PyTorch, forward and backward: the definition, and the path on a CPU.

Blocks of queries meet all of their keys at once, so that a block is a few large matrix products and its
softmax needs no correction later. A block holds `CELLS` logits (`LEAST` queries' where keys are many), and
the columns' shares of gradients are summed block after block, in one order.

Memory beyond inputs and outputs: float32 copies of the inputs, where they are of another precision or not
contiguous, and three blocks: linear in T.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Logits of one block, over all of its heads: those of a few heads stay in a core's cache.
CELLS = 1 << 19
# Queries of a block: more look at more entries that are not theirs to see, fewer make thin products.
MOST, LEAST = 64, 16


@dataclass(frozen=True)
class Settings:
    """The numbers of a call, which `retain.kernels.gated_attention.gated_attention` explains."""

    scaling: float
    protected: int = 0
    soft_cap: float | None = None


class Bias(NamedTuple):
    """Terms that act on keys and rows rather than through products: any of them may be missing."""

    log_gate_BHT: Tensor | None = None
    log_decay_BHT: Tensor | None = None
    pads_B: Tensor | None = None
    sinks_Q: Tensor | None = None


class Gradients(NamedTuple):
    """A gradient for each differentiable input; None where it was not there, or not asked for."""

    queries: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    log_gate: Tensor | None
    log_decay: Tensor | None
    sinks: Tensor | None


def forward(
    queries_BQSD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, bias: Bias, settings: Settings
) -> tuple[Tensor, Tensor]:
    """The output, in the queries' precision, and the natural log-sum-exp of every row, `[B, Q, S]`."""
    call = _Call(queries_BQSD, keys_BHTD, values_BHTD, bias, settings)
    out_RGSD = torch.empty_like(call.queries_RGSD)
    lse_RGS = call.queries_RGSD.new_empty(out_RGSD.shape[:3])
    for block in call.blocks():
        weights, _ = call.logits(block)
        top = weights.amax(-1, keepdim=True)
        if call.sinks_RG is not None:
            sinks = call.sinks_RG[block.rows, :, None, None]
            top = torch.maximum(top, sinks)
        top.masked_fill_(top == float("-inf"), 0.0)
        total = weights.sub_(top).exp_().sum(-1, keepdim=True)
        if call.sinks_RG is not None:
            total = total + (sinks - top).exp()
        out = torch.bmm(weights.flatten(1, 2), call.values_RTD[block.rows, block.keys]).view(
            *total.shape[:3], -1
        )
        lse = (total.log() + top).squeeze(-1)
        out.div_(total.masked_fill_(total == 0, 1.0))
        out_RGSD[block.rows, :, block.queries] = out
        lse_RGS[block.rows, :, block.queries] = lse
    out_BQSD = torch.empty_like(queries_BQSD).copy_(out_RGSD.view(queries_BQSD.shape))
    return out_BQSD, lse_RGS.view(queries_BQSD.shape[:3])


def backward(
    queries_BQSD: Tensor,
    keys_BHTD: Tensor,
    values_BHTD: Tensor,
    out_BQSD: Tensor,
    lse_BQS: Tensor,
    d_out_BQSD: Tensor,
    bias: Bias,
    settings: Settings,
    *,
    inner: bool = True,
) -> Gradients:
    """The gradients, from probabilities that are made again of logits and log-sum-exp.

    With `p = exp(logit - lse)` and `dp = dO v`: `ds = p (dp - sum_i p dp)`, whose sums over queries
    are the gradients of gate and decay, and whose products with keys and queries those of queries and keys.

    Args:
        queries_BQSD: and tensors up to `lse_BQS`: as in the forward, and its results.
        d_out_BQSD: gradient of the output.
        bias: and `settings`: as in the forward.
        inner: whether the gradients of queries, keys and values are wanted.
    """
    call = _Call(queries_BQSD, keys_BHTD, values_BHTD, bias, settings)
    like, R, G = call.queries_RGSD, call.num_rows, call.group
    d_out_RGSD = d_out_BQSD.to(like.dtype).reshape(like.shape)
    # Of a row that saw nothing, every probability is 0.
    lse_RGS = lse_BQS.to(like.dtype).reshape(like.shape[:3])
    lse_RGS = lse_RGS.masked_fill(lse_RGS == float("-inf"), float("inf"))
    delta_RGS = (d_out_RGSD * out_BQSD.to(like.dtype).reshape(like.shape)).sum(-1)
    d_queries = torch.empty_like(like) if inner else None
    d_keys = torch.zeros_like(call.keys_RTD) if inner else None
    d_values = torch.zeros_like(call.values_RTD) if inner else None
    d_gate = None if call.gate_RT is None else torch.zeros_like(call.gate_RT)
    d_decay = None if call.decay_RT is None else torch.zeros_like(call.decay_RT)
    for block in call.blocks():
        rows, at, seen = block.rows, block.queries, block.keys
        weights, slope = call.logits(block, slope=inner)
        weights.sub_(lse_RGS[rows, :, at, None]).exp_()
        d_out = d_out_RGSD[rows, :, at].flatten(1, 2)
        if d_values is not None:
            d_values[rows, seen].baddbmm_(weights.flatten(1, 2).transpose(1, 2), d_out)
        d_logits = torch.bmm(d_out, call.values_RTD[rows, seen].transpose(1, 2)).view_as(weights)
        d_logits.sub_(delta_RGS[rows, :, at, None]).mul_(weights)
        if d_gate is not None or d_decay is not None:
            call.add_bias_gradients_(block, d_logits, d_gate, d_decay)
        if d_queries is not None and d_keys is not None:
            if slope is not None:
                d_logits.mul_(slope)
            flat = d_logits.flatten(1, 2)
            d_queries[rows, :, at] = torch.bmm(flat, call.keys_RTD[rows, seen]).view(*weights.shape[:3], -1)
            # The queries hold the factor on the logits already.
            d_keys[rows, seen].baddbmm_(flat.transpose(1, 2), call.queries_RGSD[rows, :, at].flatten(1, 2))
    d_sinks = None
    if call.sinks_RG is not None:
        # A sink pays for nothing, so that its `dp` is 0.
        d_sinks = -((call.sinks_RG[..., None] - lse_RGS).exp() * delta_RGS).sum(-1)
        d_sinks = d_sinks.view(-1, R // len(queries_BQSD) * G).sum(0)

    def shaped(gradient: Tensor | None, given: Tensor | None) -> Tensor | None:
        if gradient is None or given is None:
            return None
        return gradient.view(given.shape).to(given.dtype)

    def laid_out(gradient: Tensor | None, given: Tensor) -> Tensor | None:
        """As what it is the gradient of, whose strides are promised to the compiler."""
        found = shaped(gradient, given)
        return found if found is None or given.is_contiguous() else torch.empty_like(given).copy_(found)

    return Gradients(
        laid_out(None if d_queries is None else d_queries.mul_(settings.scaling), queries_BQSD),
        laid_out(d_keys, keys_BHTD),
        laid_out(d_values, values_BHTD),
        shaped(d_gate, bias.log_gate_BHT),
        shaped(d_decay, bias.log_decay_BHT),
        shaped(d_sinks, bias.sinks_Q),
    )


class _Block(NamedTuple):
    """Some queries of some rows, and the keys up to the last that one of them sees."""

    rows: slice
    queries: slice
    keys: slice


class _Call:
    """The inputs in one precision and row by row, `R = B H`, and where the blocks are."""

    def __init__(
        self, queries_BQSD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, bias: Bias, settings: Settings
    ):
        B, Q, S, D = queries_BQSD.shape
        H, T = keys_BHTD.shape[1:3]
        self.settings, self.num_rows, self.num_heads = settings, B * H, H
        self.group, self.num_queries, self.num_keys = Q // H, S, T
        self.dtype = torch.promote_types(queries_BQSD.dtype, torch.float32)
        rows = queries_BQSD.to(self.dtype).reshape(B * H, Q // H, S, D)
        self.queries_RGSD = rows * settings.scaling
        self.keys_RTD = keys_BHTD.to(self.dtype).reshape(B * H, T, D)
        self.values_RTD = values_BHTD.to(self.dtype).reshape(B * H, T, D)
        self.gate_RT = self._rows(bias.log_gate_BHT)
        self.decay_RT = self._rows(bias.log_decay_BHT)
        self.sinks_RG = None
        if bias.sinks_Q is not None:
            self.sinks_RG = bias.sinks_Q.to(self.dtype).view(1, H, -1).expand(B, -1, -1).flatten(0, 1)
        # Padding of every row, up to the most that one has.
        self.absent_RT = None
        if bias.pads_B is not None and (most := int(bias.pads_B.max())):
            absent_BT = torch.arange(most, device=keys_BHTD.device) < bias.pads_B[:, None]
            self.absent_RT = absent_BT[:, None].expand(-1, H, -1).flatten(0, 1)

    def _rows(self, given_BHT: Tensor | None) -> Tensor | None:
        return None if given_BHT is None else given_BHT.to(self.dtype).reshape(self.num_rows, -1)

    def blocks(self) -> Iterator[_Block]:
        """Queries in order, and rows in order for each."""
        S, T, G = self.num_queries, self.num_keys, self.group
        step = max(1, min(S, MOST, max(LEAST, CELLS // (max(1, T) * G))))
        for start in range(0, S, step):
            stop = min(S, start + step)
            last = T - S + stop
            rows = max(1, CELLS // (last * (stop - start) * G))
            for row in range(0, self.num_rows, rows):
                yield _Block(slice(row, row + rows), slice(start, stop), slice(0, last))

    def logits(self, block: _Block, *, slope: bool = False) -> tuple[Tensor, Tensor | None]:
        """`[r, G, s, K]`, -inf on what a query does not see; and, if asked for, the soft cap's derivative."""
        rows, seen, cap = block.rows, block.keys, self.settings.soft_cap
        queries = self.queries_RGSD[rows, :, block.queries]
        flat = torch.bmm(queries.flatten(1, 2), self.keys_RTD[rows, seen].transpose(1, 2))
        logits, factor = flat.view(*queries.shape[:3], -1), None
        if cap is not None:
            logits.div_(cap).tanh_()
            factor = 1 - logits.square() if slope else None
            logits.mul_(cap)
        self._add_bias_(block, logits)
        j0 = self._entries(block)[0]
        if j0 + 1 < seen.stop:
            later = self._distance(block, j0 + 1, seen.stop) < 0
            logits[..., j0 + 1 :].masked_fill_(later, float("-inf"))
        if self.absent_RT is not None:
            absent = self.absent_RT[rows, None, None, seen]
            logits[..., : absent.shape[-1]].masked_fill_(absent, float("-inf"))
        return logits, factor

    def _entries(self, block: _Block) -> tuple[int, int]:
        """Entry index of a block's first and last query."""
        before = self.num_keys - self.num_queries
        return before + block.queries.start, before + block.queries.stop - 1

    def _distance(self, block: _Block, first: int, last: int) -> Tensor:
        """`[s, last - first]`, how many entries lie from a key to a query."""
        j0, j1 = self._entries(block)
        device = self.keys_RTD.device
        query = torch.arange(j0, j1 + 1, device=device)[:, None]
        return query - torch.arange(first, last, device=device)

    def _gated(self, block: _Block) -> tuple[int, int]:
        """Up to where keys are gated for all queries of a block, and up to where for some of them."""
        j0, j1 = self._entries(block)
        every = min(max(j0 - self.settings.protected + 1, 0), block.keys.stop)
        return every, min(max(j1 - self.settings.protected + 1, every), block.keys.stop)

    def _add_bias_(self, block: _Block, logits: Tensor) -> None:
        """Gate and decay, where they act."""
        if self.gate_RT is None and self.decay_RT is None:
            return
        (every, some), rows = self._gated(block), block.rows
        all_of_them = logits[..., :every]
        if self.gate_RT is not None:
            all_of_them += self.gate_RT[rows, None, None, :every]
        if self.decay_RT is not None:
            distance = self._distance(block, 0, every).to(self.dtype)
            all_of_them.addcmul_(distance, self.decay_RT[rows, None, None, :every])
        if some > every:
            distance = self._distance(block, every, some)
            bias = torch.zeros((), dtype=self.dtype, device=logits.device)
            if self.decay_RT is not None:
                bias = distance * self.decay_RT[rows, None, None, every:some]
            if self.gate_RT is not None:
                bias = bias + self.gate_RT[rows, None, None, every:some]
            logits[..., every:some] += torch.where(distance >= self.settings.protected, bias, 0.0)

    def add_bias_gradients_(
        self, block: _Block, d_logits: Tensor, d_gate: Tensor | None, d_decay: Tensor | None
    ) -> None:
        """Sums over a block's queries and group of `ds`, and of `ds` times the distance."""
        (every, some), rows = self._gated(block), block.rows
        for first, last in ((0, every), (every, some)):
            if last <= first:
                continue
            part = d_logits[..., first:last].sum(1)
            distance = self._distance(block, first, last)
            if first == every:
                part = part.masked_fill(distance < self.settings.protected, 0.0)
            if d_gate is not None:
                d_gate[rows, first:last] += part.sum(1)
            if d_decay is not None:
                d_decay[rows, first:last] += (part * distance).sum(1)
