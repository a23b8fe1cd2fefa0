"""Triton kernels of attention statistics: two passes over the products, no matrix of all pairs.

The first pass walks the keys of a block of rows (a few queries, all query heads of their KV head, so that a
key is read once for the group) and keeps their log-sum-exp. The second pass turns it round: a program owns a
block of keys, walks the queries that see it, and reduces over them in registers. Every number has one program
that writes it, so that there are no atomics and results do not change from run to run.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

# Lower than any product, yet finite: nothing subtracted from it makes a NaN.
_LOW = tl.constexpr(-1e30)
EPS = tl.constexpr(1e-10)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _rows_of(pointer, stride_row, stride_column, num_rows, D: tl.constexpr, ROWS: tl.constexpr,
             BLOCK_D: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """A tile `[ROWS, BLOCK_D]` from a pointer on, zeros behind `num_rows` and D."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    pointers = pointer + row[:, None] * stride_row + column[None, :] * stride_column
    inside = row[:, None] < num_rows
    if D != BLOCK_D:
        inside = inside & (column[None, :] < D)
    tile = tl.load(pointers, mask=inside, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _capped(products, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Logits in units of log 2 that are still to be multiplied by the second result.

    `scale` is of the products, log2(e) included; with a cap everything is multiplied already.
    """
    if HAS_CAP:
        # Cap and scale are in units of log 2, which cancel. tanh |x| = (1 - p) / (1 + p) for p = exp(-2 |x|).
        power = tl.exp2(tl.abs(products) * (-2.0 * LOG2E * scale / soft_cap))
        size = soft_cap * (1.0 - power) / (1.0 + power)
        return tl.where(products < 0, -size, size), 1.0
    else:
        return products, scale


@triton.jit(do_not_specialize=["S", "T", "first"])
def lse_kernel(Q, K, EXISTS, ASKS, SINKS, SHIFT,
               stride_qb, stride_qq, stride_qs, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
               stride_eb, stride_eh, stride_ab, stride_as, stride_sinks,
               BH, H, G, S, stride_row, T, first, scale, soft_cap,
               D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Minus the log-sum-exp of rows, sinks included, in units of log 2: what makes a probability of a logit;
    -inf, which makes 0 of any, where there is no query or it sees nothing.

    A block is `BLOCK_M` of the rows `(query, query head of the group)`, the head fastest.
    """
    program = tl.program_id(0)
    row_of_heads, block = program % BH, program // BH
    # Causal rows are the longer the later they are: they begin first.
    block = tl.cdiv(S * G, BLOCK_M) - 1 - block
    b, h = (row_of_heads // H).to(tl.int64), (row_of_heads % H).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < S * G
    s, g = row // G, row % G
    query_entry = first + s
    column = tl.arange(0, BLOCK_D)
    at = Q + b * stride_qb + h * G * stride_qq
    at = at + (s.to(tl.int64) * stride_qs + g.to(tl.int64) * stride_qq)[:, None] + column[None, :] * stride_qd
    queries = tl.load(at, mask=inside[:, None] & (column[None, :] < D), other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    if EXISTS is not None:
        EXISTS += b * stride_eb + h * stride_eh
    K += b * stride_kb + h * stride_kh

    first_entry = first + (block * BLOCK_M) // G
    last_entry = first + tl.minimum(S - 1, (block * BLOCK_M + BLOCK_M - 1) // G)
    stop = tl.minimum(T, last_entry + 1)
    # What a row sees lies before `upper`; causality hides nothing before `ragged` from any row of the block.
    upper = tl.minimum(stop, query_entry + 1)
    ragged = tl.minimum(stop, first_entry + 1) // BLOCK_N * BLOCK_N

    most = tl.full([BLOCK_M], _LOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for n in range(0, stop, BLOCK_N):
        n = tl.multiple_of(n, BLOCK_N)
        entry = n + tl.arange(0, BLOCK_N)
        keys = _rows_of(
            K + tl.cast(n, tl.int64) * stride_kt, stride_kt, stride_kd, stop - n, D, BLOCK_N, BLOCK_D, UPCAST
        )
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        logits, factor = _capped(products, scale, soft_cap, HAS_CAP)
        if n >= ragged:
            logits = tl.where(entry[None, :] < upper[:, None], logits, float("-inf"))
        if EXISTS is not None:
            logits = tl.where(tl.load(EXISTS + entry)[None, :] != 0, logits, float("-inf"))
        higher = tl.maximum(most, tl.max(logits, 1))
        total = total * tl.exp2((most - higher) * factor)
        total += tl.sum(tl.exp2(logits * factor - (higher * factor)[:, None]), 1)
        most = higher
    if not HAS_CAP:
        most = most * scale

    head = h * G + g
    if SINKS is not None:
        sink = tl.load(SINKS + head * stride_sinks, mask=inside, other=0.0).to(tl.float32) * LOG2E
        higher = tl.maximum(most, sink)
        total = total * tl.exp2(most - higher) + tl.exp2(sink - higher)
        most = higher
    shift = tl.where(total > 0, -most - tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    if ASKS is not None:
        asks = tl.load(ASKS + b * stride_ab + s.to(tl.int64) * stride_as, mask=inside, other=0)
        shift = tl.where(asks != 0, shift, float("-inf"))
    tl.store(SHIFT + (b * H * G + head) * stride_row + s, shift, mask=inside)


@triton.jit(do_not_specialize=["S", "T", "first", "entries", "distance"])
def stats_kernel(Q, K, SHIFT, EXISTS, LEAST, MAX, SUM, SCATTER, ENTROPY, LAST,
                 stride_qb, stride_qq, stride_qs, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
                 stride_eb, stride_eh,
                 BH, H, G, S, stride_row, T, first, entries, scale, soft_cap, distance,
                 D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 HAS_CAP: tl.constexpr, BLANKS: tl.constexpr, PRECISION: tl.constexpr,
                 UPCAST: tl.constexpr):  # fmt: skip
    """Statistics of `BLOCK_N` of the first `entries` keys over the queries of one query head.

    `BLANKS`: some queries may not be there, where anything may lie.

    Rows of `SHIFT` and `LEAST` are longer than S by what fills a block: with -inf, and with inf.
    """
    program = tl.program_id(0)
    # Under causality the first keys have the most queries: they begin first.
    row_of_heads, block = (program % (BH * G)).to(tl.int64), program // (BH * G)
    b, head = row_of_heads // (H * G), row_of_heads % (H * G)
    h = head // G
    n0 = block * BLOCK_N
    entry = n0 + tl.arange(0, BLOCK_N)
    inside = entry < entries
    # What lies where nothing exists may be anything: it is not read.
    exists = inside
    if EXISTS is not None:
        EXISTS += b * stride_eb + h * stride_eh
        exists = tl.load(EXISTS + entry, mask=inside, other=0) != 0
    column = tl.arange(0, BLOCK_D)
    at = K + b * stride_kb + h * stride_kh + n0.to(tl.int64) * stride_kt
    at = at + tl.arange(0, BLOCK_N)[:, None] * stride_kt + column[None, :] * stride_kd
    keys = tl.load(at, mask=exists[:, None] & (column[None, :] < D), other=0.0)
    if UPCAST:
        keys = keys.to(tl.float32)

    # Queries that count a key: from the first on that is far enough behind it.
    earliest = entry + (distance - first)
    last_key = tl.minimum(n0 + BLOCK_N, entries) - 1
    start = tl.maximum(0, n0 + distance - first) // BLOCK_M * BLOCK_M
    # From `whole` on, every pair of real queries is counted.
    whole = tl.cdiv(tl.maximum(0, last_key + distance - first), BLOCK_M) * BLOCK_M

    worst = tl.full([BLOCK_N], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_N], tl.float32)
    scatter = tl.zeros([BLOCK_N], tl.float32)
    mean = tl.zeros([BLOCK_N], tl.float32)
    spread = tl.zeros([BLOCK_N], tl.float32)
    when = tl.full([BLOCK_N], -1, tl.int32)
    row = row_of_heads * stride_row
    for j in range(start, S, BLOCK_M):
        j = tl.multiple_of(j, BLOCK_M)
        s = j + tl.arange(0, BLOCK_M)
        block_of_q = Q + b * stride_qb + head * stride_qq + tl.cast(j, tl.int64) * stride_qs
        queries = _rows_of(block_of_q, stride_qs, stride_qd, S - j, D, BLOCK_M, BLOCK_D, UPCAST)
        shift = tl.load(SHIFT + row + s)
        # Keys are rows, so that what is reduced over lies in few threads.
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        logits, factor = _capped(products, scale, soft_cap, HAS_CAP)
        logits = logits * factor + shift[None, :]
        if BLANKS:
            # What lies where no query is may be NaN. It is read all the same: loads that wait for no
            # other load are under way early, and a query spoils its column alone.
            logits = tl.where(shift[None, :] > float("-inf"), logits, float("-inf"))
        if j < whole:
            logits = tl.where(s[None, :] >= earliest[:, None], logits, float("-inf"))
        if MAX is not None:
            worst = tl.maximum(worst, tl.max(logits, 1))
        if SUM is not None or SCATTER is not None or ENTROPY is not None or LAST is not None:
            # A log-sum-exp has the digits of a number as large as the logits: never more than 1.
            probs = tl.exp2(tl.minimum(logits, 0.0))
            if SUM is not None:
                mass += tl.sum(probs, 1)
            if SCATTER is not None:
                # Two samples put together: of `before` queries, which paid 0 where they did not count
                # the key, and of the block's.
                before, num = tl.cast(j, tl.float32), tl.cast(tl.minimum(S - j, BLOCK_M), tl.float32)
                block_mean = tl.sum(probs, 1) / num
                apart = tl.where(s[None, :] < S, probs - block_mean[:, None], 0.0)
                moved, share = block_mean - mean, num / (before + num)
                scatter += tl.sum(apart * apart, 1) + moved * moved * (before * share)
                mean += moved * share
            if ENTROPY is not None:
                spread -= tl.sum(probs * tl.log(probs + EPS), 1)
            if LAST is not None:
                least = tl.load(LEAST + row + s)
                # What is not counted is -inf, where even a probability of 0 is enough for an access.
                accessed = (probs >= least[None, :]) & (logits > float("-inf"))
                when = tl.maximum(when, tl.max(tl.where(accessed, first + s[None, :], -1), 1))
    # An entry that is not there was paid nothing.
    to = row_of_heads * entries + entry
    if MAX is not None:
        tl.store(MAX + to, tl.where(exists, tl.exp2(tl.minimum(worst, 0.0)), 0.0), mask=inside)
    if SUM is not None:
        tl.store(SUM + to, tl.where(exists, mass, 0.0), mask=inside)
    if SCATTER is not None:
        tl.store(SCATTER + to, tl.where(exists, scatter, 0.0), mask=inside)
    if ENTROPY is not None:
        tl.store(ENTROPY + to, tl.where(exists, spread, 0.0), mask=inside)
    if LAST is not None:
        tl.store(LAST + to, tl.where(exists, when, -1).to(tl.int64), mask=inside)
