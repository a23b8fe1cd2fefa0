"""Triton kernels of pooled rows: attention smoothed over neighbouring keys, then its statistics.

A neighbour's probability is made anew from its key, since blocks of keys do not share registers; windows are
short, and their products cheap.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from retain.kernels.attention_stats.kernel import BY_ENTRY, BY_PLACE, EPS, capped, store_stats


@triton.jit
def _pooled(queries, shift_of, own, own_place, entry, place, K, EXISTS, PLACE, T, stride_kt, stride_kd,
            stride_pt, split, reach, scale, soft_cap, window, D: tl.constexpr, BLOCK_D: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
            HAS_CAP: tl.constexpr, AVERAGE: tl.constexpr, PRECISION: tl.constexpr,
            UPCAST: tl.constexpr):  # fmt: skip
    """Probabilities `[keys, queries]`, and those smoothed over the keys at most `reach` places away."""
    column = tl.arange(0, BLOCK_D)
    pooled = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    own_probs = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for shift in range(-reach, reach + 1):
        other = entry + shift
        near = (other >= 0) & (other < T) & ((other < split) == (entry < split))
        wide = other.to(tl.int64)
        if EXISTS is not None:
            near = near & (tl.load(EXISTS + other, mask=near, other=0) != 0)
        if PLACE is not None:
            other_place = tl.load(PLACE + wide * stride_pt, mask=near, other=0)
            near = near & (tl.abs(other_place - place) <= reach)
        at = K + wide[:, None] * stride_kt + column[None, :] * stride_kd
        keys = tl.load(at, mask=near[:, None] & (column[None, :] < D), other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        logits, factor = capped(products, scale, soft_cap, HAS_CAP)
        # What lies where no query is may be NaN, and reaches no key.
        seen = near[:, None] & (shift_of > float("-inf"))[None, :] & (other[:, None] <= own[None, :])
        if WINDOW == BY_ENTRY:
            seen = seen & (other[:, None] > own[None, :] - window)
        if WINDOW == BY_PLACE:
            seen = seen & (other_place[:, None] > own_place[None, :] - window)
        # A log-sum-exp has the digits of a number as large as the logits: never more than 1.
        logits = tl.minimum(logits * factor + shift_of[None, :], 0.0)
        probs = tl.exp2(tl.where(seen, logits, float("-inf")))
        if AVERAGE:
            pooled += probs
        else:
            pooled = tl.maximum(pooled, probs)
        own_probs = tl.where(shift == 0, probs, own_probs)
    if AVERAGE:
        pooled = pooled / (2 * reach + 1)
    return own_probs, pooled


@triton.jit
def _row_block(Q, SHIFT, PLACE, s, S, first, stride_qs, stride_qd, stride_pt,
               D: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
               UPCAST: tl.constexpr):  # fmt: skip
    """Queries of one query head: themselves, their log-sum-exp in units of log 2, and where they are."""
    wide, column = s.to(tl.int64), tl.arange(0, BLOCK_D)
    at = Q + wide[:, None] * stride_qs + column[None, :] * stride_qd
    queries = tl.load(at, mask=(s < S)[:, None] & (column[None, :] < D), other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    shift_of = tl.load(SHIFT + s, mask=s < S, other=float("-inf"))
    own = first + s
    own_place = own
    if WINDOW == BY_PLACE:
        own_place = tl.load(PLACE + own.to(tl.int64) * stride_pt, mask=s < S, other=0)
    return queries, shift_of, own, own_place


@triton.jit(do_not_specialize=["S", "T", "first", "split", "reach", "window", "parts"])
def mass_kernel(Q, K, SHIFT, EXISTS, PLACE, MASS,
                stride_qb, stride_qq, stride_qs, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
                stride_eb, stride_eh, stride_pb, stride_pt, BH, H, G, S, stride_row, T, first, scale,
                soft_cap, window, split, reach, parts,
                D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, AVERAGE: tl.constexpr,
                PRECISION: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Mass of rows before and after pooling, on both sides of the split, over one part of the keys.

    `MASS` is `[parts, 4, B, Q, S]`: before and after on the first side, before and after on the second.
    """
    program = tl.program_id(0)
    row, rest = program % (BH * G), program // (BH * G)
    part, block = rest % parts, rest // parts
    b, head = (row // (H * G)).to(tl.int64), (row % (H * G)).to(tl.int64)
    h = head // G
    s = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if PLACE is not None:
        PLACE += b * stride_pb
    if EXISTS is not None:
        EXISTS += b * stride_eb + h * stride_eh
    queries, shift_of, own, own_place = _row_block(
        Q + b * stride_qb + head * stride_qq, SHIFT + (b * H * G + head) * stride_row, PLACE, s, S, first,
        stride_qs, stride_qd, stride_pt, D, BLOCK_D, WINDOW, UPCAST)  # fmt: skip
    before_0 = tl.zeros([BLOCK_M], tl.float32)
    before_1 = tl.zeros([BLOCK_M], tl.float32)
    after_0 = tl.zeros([BLOCK_M], tl.float32)
    after_1 = tl.zeros([BLOCK_M], tl.float32)
    each = tl.cdiv(tl.cdiv(T, BLOCK_N), parts) * BLOCK_N
    for n in range(part * each, tl.minimum(T, part * each + each), BLOCK_N):
        entry = n + tl.arange(0, BLOCK_N)
        exists, place = entry < T, entry
        if PLACE is not None:
            place = tl.load(PLACE + entry.to(tl.int64) * stride_pt, mask=entry < T, other=0)
        if EXISTS is not None:
            exists = tl.load(EXISTS + entry, mask=entry < T, other=0) != 0
        probs, pooled = _pooled(
            queries, shift_of, own, own_place, entry, place, K + b * stride_kb + h * stride_kh, EXISTS, PLACE,
            T, stride_kt, stride_kd, stride_pt, split, reach, scale, soft_cap, window, D, BLOCK_D, BLOCK_M,
            BLOCK_N, WINDOW, HAS_CAP, AVERAGE, PRECISION, UPCAST)  # fmt: skip
        first_side = (entry < split)[:, None]
        pooled = tl.where(exists[:, None], pooled, 0.0)
        before_0 += tl.sum(tl.where(first_side, probs, 0.0), 0)
        before_1 += tl.sum(tl.where(first_side, 0.0, probs), 0)
        after_0 += tl.sum(tl.where(first_side, pooled, 0.0), 0)
        after_1 += tl.sum(tl.where(first_side, 0.0, pooled), 0)
    rows = tl.cast(BH * G, tl.int64) * S
    to = MASS + tl.cast(part, tl.int64) * 4 * rows + (b * H * G + head) * S + s
    tl.store(to, before_0, mask=s < S)
    tl.store(to + rows, after_0, mask=s < S)
    tl.store(to + 2 * rows, before_1, mask=s < S)
    tl.store(to + 3 * rows, after_1, mask=s < S)


@triton.jit(do_not_specialize=["S", "T", "first", "k0", "k1", "split", "reach", "window"])
def pooled_kernel(Q, K, SHIFT, EXISTS, PLACE, FACTOR, MAX, SUM, ENTROPY, PLAIN,
                  stride_qb, stride_qq, stride_qs, stride_qd, stride_kb, stride_kh, stride_kt, stride_kd,
                  stride_eb, stride_eh,
                  stride_pb, stride_pt,
                  BH, H, G, S, stride_row, T, first, k0, k1, scale, soft_cap, window, split, reach,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, AVERAGE: tl.constexpr,
                  GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Statistics of pooled rows; `FACTOR` is `[2, B, Q, S]`, what they are scaled by on each side."""
    program = tl.program_id(0)
    row, block = program % BH, program // BH
    b, h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    entry = k0 + block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = entry < k1
    exists, place = inside, entry
    if PLACE is not None:
        PLACE += b * stride_pb
        place = tl.load(PLACE + entry.to(tl.int64) * stride_pt, mask=inside, other=0)
    if EXISTS is not None:
        EXISTS += b * stride_eb + h * stride_eh
        exists = tl.load(EXISTS + entry, mask=inside, other=0) != 0
    all_worst = tl.zeros([BLOCK_N], tl.float32)
    all_mass = tl.zeros([BLOCK_N], tl.float32)
    all_plain = tl.zeros([BLOCK_N], tl.float32)
    all_spread = tl.zeros([BLOCK_N], tl.float32)
    for g in range(G):
        head = h * G + g
        worst = tl.zeros([BLOCK_N], tl.float32)
        mass = tl.zeros([BLOCK_N], tl.float32)
        plain = tl.zeros([BLOCK_N], tl.float32)
        spread = tl.zeros([BLOCK_N], tl.float32)
        for j in range(0, S, BLOCK_M):
            s = j + tl.arange(0, BLOCK_M)
            queries, shift_of, own, own_place = _row_block(
                Q + b * stride_qb + head * stride_qq, SHIFT + (b * H * G + head) * stride_row, PLACE, s, S,
                first, stride_qs, stride_qd, stride_pt, D, BLOCK_D, WINDOW,
                UPCAST)  # fmt: skip
            own_probs, pooled = _pooled(
                queries, shift_of, own, own_place, entry, place, K + b * stride_kb + h * stride_kh, EXISTS,
                PLACE, T, stride_kt, stride_kd, stride_pt, split, reach, scale, soft_cap, window, D,
                BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, HAS_CAP, AVERAGE, PRECISION, UPCAST)  # fmt: skip
            if PLAIN is not None:
                plain += tl.sum(own_probs, 1)
            if FACTOR is not None:
                at = FACTOR + (b * H * G + head) * S + s
                factor_0 = tl.load(at, mask=s < S, other=0.0)
                factor_1 = tl.load(at + BH * G * S, mask=s < S, other=0.0)
                pooled *= tl.where((entry < split)[:, None], factor_0[None, :], factor_1[None, :])
            worst = tl.maximum(worst, tl.max(pooled, 1))
            mass += tl.sum(pooled, 1)
            if ENTROPY is not None:
                spread -= tl.sum(pooled * tl.log(pooled + EPS), 1)
        if GROUP:
            all_worst = tl.maximum(all_worst, worst)
            all_mass += mass
            all_plain += plain
            all_spread += spread
        else:
            to = (b * H * G + head) * (k1 - k0)
            if PLAIN is not None:
                tl.store(PLAIN + to + entry - k0, tl.where(exists, plain, 0.0), mask=inside)
            store_stats(MAX, SUM, ENTROPY, None, worst, mass, spread, worst, to, entry - k0, inside, exists)
    if GROUP:
        to = (b * H + h) * (k1 - k0)
        if PLAIN is not None:
            tl.store(PLAIN + to + entry - k0, tl.where(exists, all_plain, 0.0), mask=inside)
        store_stats(
            MAX,
            SUM,
            ENTROPY,
            None,
            all_worst,
            all_mass,
            all_spread,
            all_worst,
            to,
            entry - k0,
            inside,
            exists,
        )
