"""Triton kernels of gated attention: the forward, and a backward without atomics.

- `forward_`: a program per block of queries.
- `d_keys_`: a program per block of keys, which walks over all queries of its group and so owns the gradients
  of its keys, values, gates and decays.
- `d_queries_`: a program per block of queries.

One loop over blocks asks of each block once, as a scalar, whether a boundary runs through it (the diagonal,
the protected window's edge). Only then single elements are tested; else the whole block
is gated, or none of it is. One loop for each of these stretches would say the same, and is what Triton 3.7
compiles badly: where the products of a loop are still under way when the next begins, ptxas waits after
every single one (its note C7515), and pointers of all loops fill the registers.

Logits are in units of log 2, so that `exp2` needs no factor, and the factor on them, the gate and the decay
are folded into one multiply-add each. Rows of `delta` and `lse2` are padded to whole blocks, so that they
are read without a mask.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Options of a call, as bits.
GATE, DECAY, PADS, CAP, SINKS = (tl.constexpr(1 << bit) for bit in range(5))


@triton.constexpr_function
def _has(has, bits):
    """Tells whether a call has one of these."""
    return bool(has & bits)


@triton.jit
def _tanh(x):
    """By exp2 of a negative number, which cannot overflow; by a series where that would cancel."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    square = x * x
    near = tl.abs(x) * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    size = tl.where(square < 0.01, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -size, size)


@triton.jit
def _offsets(stride, stride_d, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of a tile's elements, from its first row on."""
    return tl.arange(0, BLOCK)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :] * stride_d


@triton.jit
def _row(at, first, stride):
    """Where a row begins."""
    return at + (tl.full([], 0, tl.int64) + first) * stride


@triton.jit
def _load(
    at, offsets, left,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A tile from `at` on, of which `left` rows are there (`WHOLE`: all of them), zeros elsewhere."""
    if WHOLE and D == BLOCK_D:
        part = tl.load(at + offsets)
    elif D == BLOCK_D:
        part = tl.load(at + offsets, mask=tl.arange(0, BLOCK)[:, None] < left, other=0.0)
    else:
        mask = tl.arange(0, BLOCK_D)[None, :] < D
        if not WHOLE:
            mask = mask & (tl.arange(0, BLOCK)[:, None] < left)
        part = tl.load(at + offsets, mask=mask, other=0.0)
    if UPCAST:
        part = part.to(tl.float32)
    return part


@triton.jit
def _store(at, offsets, left, part, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """As much of a tile as there is."""
    mask = (tl.arange(0, BLOCK)[:, None] < left) & (tl.arange(0, BLOCK_D)[None, :] < D)
    tl.store(at + offsets, part.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _key_bias(
    gate_at, decay_at, gate_t, decay_t, keys_i, anchor, limit,
    HAS: tl.constexpr,
):  # fmt: skip
    """Bias of a block of keys, `gate_i + (anchor - i) decay_i`, and `decay_i`, in units of log 2 (the anchor
    is near by, so that distances stay exact)."""
    gate = tl.zeros_like(keys_i).to(tl.float32)
    decay = gate
    inside = keys_i < limit
    if _has(HAS, GATE):
        at = gate_at + keys_i.to(tl.int64) * gate_t
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if _has(HAS, DECAY):
        at = decay_at + keys_i.to(tl.int64) * decay_t
        decay = tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
        gate += (anchor - keys_i).to(tl.float32) * decay
    return gate, decay


@triton.jit
def _logits(
    product, query_j, keys_i, local, gate, decay, tested, gated, pads, scale, cap, protected,
    HAS: tl.constexpr,
):  # fmt: skip
    """Logits in units of log 2 of a tile, whichever way it lies, and the tanh of the soft cap.

    `query_j` is a query's entry, `local` the same counted from the anchor that `gate` was made for.
    """
    tanh = product
    factor = scale
    if _has(HAS, CAP):
        tanh = _tanh(product * scale)
        factor = cap
    logits = tanh * factor
    # Triton 3.6 pipelines no loop in which a product is used inside of an `if`; and so this is one FMA.
    if _has(HAS, GATE | DECAY):
        whole = gated & (tested == 0)
        bias = tl.where(whole, gate, 0.0)
        if _has(HAS, DECAY):
            bias = tl.fma(local.to(tl.float32), tl.where(whole, decay, 0.0), bias)
        logits = tl.fma(tanh, factor, bias)
    if tested:
        if _has(HAS, GATE | DECAY):
            bias = gate
            if _has(HAS, DECAY):
                bias = tl.fma(local.to(tl.float32), decay, gate)
            logits += tl.where(query_j - protected >= keys_i, bias, 0.0)
        seen = query_j >= keys_i
        if _has(HAS, PADS):
            seen &= keys_i >= pads
        logits = tl.where(seen, logits, float("-inf"))
    return logits, tanh


@triton.jit
def _place(pid, num_blocks, H, G, LAST_FIRST: tl.constexpr):
    """Block, sequence, KV head and member of the group of a program: heads of a group, which read the same
    keys, run beside one another, and of a head's blocks those with the most work come first."""
    block = pid // G % num_blocks
    row = pid // G // num_blocks
    if LAST_FIRST:
        block = num_blocks - 1 - block
    return block, (row // H).to(tl.int64), (row % H).to(tl.int64), (pid % G).to(tl.int64)


@triton.jit
def _key_bounds(j0, num_keys, protected, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where blocks of keys begin for queries `j0 .. j0 + BLOCK_S`: the first that is not gated for all, and
    the first that is gated for none; the first that is not seen by all, and where they end."""
    end = tl.minimum(j0 + BLOCK_S, num_keys)
    near = tl.maximum(j0 - protected + 1, 0) // BLOCK_T * BLOCK_T
    open = tl.maximum(end - protected, 0)
    diagonal = (j0 + 1) // BLOCK_T * BLOCK_T
    return near, open, diagonal, end


@triton.jit
def forward_(
    queries_at, keys_at, values_at, gate_at, decay_at, pads_at, sinks_at, out_at, lse_at,
    query_b, query_h, query_s, query_d, key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    gate_b, gate_h, gate_t, decay_b, decay_h, decay_t, sinks_q,
    out_b, out_h, out_s, out_d,
    H, G, num_queries, num_keys, num_blocks, scale, cap, protected,
    HAS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one block of queries of one query head."""
    block, b, h, member = _place(tl.program_id(0), num_blocks, H, G, True)
    q = h * G + member
    keys_at += b * key_b + h * key_h
    values_at += b * value_b + h * value_h
    if _has(HAS, GATE):
        gate_at += b * gate_b + h * gate_h
    if _has(HAS, DECAY):
        decay_at += b * decay_b + h * decay_h
    pads = 0
    if _has(HAS, PADS):
        pads = tl.load(pads_at + b).to(tl.int32)
    s0 = block * BLOCK_S
    j0 = num_keys - num_queries + s0
    rows = s0 + tl.arange(0, BLOCK_S)
    queries = _load(
        _row(queries_at + b * query_b + q * query_h, s0, query_s),
        _offsets(query_s, query_d, BLOCK_S, BLOCK_D), num_queries - s0, D, BLOCK_S, BLOCK_D, WHOLE, UPCAST,
    )  # fmt: skip
    key_offsets = _offsets(key_t, key_d, BLOCK_T, BLOCK_D)
    value_offsets = _offsets(value_t, value_d, BLOCK_T, BLOCK_D)
    out = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_S], tl.float32)
    top = tl.full([BLOCK_S], float("-inf"), tl.float32)
    near, open, diagonal, end = _key_bounds(j0, num_keys, protected, BLOCK_S, BLOCK_T)
    local = tl.arange(0, BLOCK_S)
    for i0 in range(0, end, BLOCK_T):
        tested = i0 >= diagonal
        if _has(HAS, GATE | DECAY):
            tested |= (i0 >= near) & (i0 < open)
        if _has(HAS, PADS):
            tested |= i0 < pads
        keys_i = i0 + tl.arange(0, BLOCK_T)
        keys = _load(keys_at, key_offsets, num_keys - i0, D, BLOCK_T, BLOCK_D, WHOLE, UPCAST)
        keys_at += BLOCK_T * key_t
        product = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        gate, decay = _key_bias(gate_at, decay_at, gate_t, decay_t, keys_i, j0, num_keys, HAS)
        logits, _ = _logits(
            product, (j0 + local)[:, None], keys_i[None, :], local[:, None],
            gate[None, :], decay[None, :], tested, i0 < near, pads, scale, cap, protected, HAS,
        )  # fmt: skip
        above = tl.maximum(top, tl.max(logits, 1))
        finite = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp2(logits - finite[:, None])
        fade = tl.exp2(top - finite)
        total = total * fade + tl.sum(weights, 1)
        out = out * fade[:, None]
        values = _load(values_at, value_offsets, num_keys - i0, D, BLOCK_T, BLOCK_D, WHOLE, UPCAST)
        values_at += BLOCK_T * value_t
        out = tl.dot(weights.to(values.dtype), values, out, input_precision=PRECISION)
        top = above
    if _has(HAS, SINKS):
        sink = tl.load(sinks_at + q * sinks_q).to(tl.float32) * LOG2E
        above = tl.maximum(top, sink)
        finite = tl.where(above == float("-inf"), 0.0, above)
        fade = tl.exp2(top - finite)
        total = total * fade + tl.exp2(sink - finite)
        out = out * fade[:, None]
        top = above
    empty = total == 0.0
    divisor = tl.where(empty, 1.0, total)
    out = tl.where(empty[:, None], 0.0, out / divisor[:, None])
    lse = tl.where(empty, float("-inf"), (top + tl.log2(divisor)) * LN2)
    _store(
        _row(out_at + b * out_b + q * out_h, s0, out_s), _offsets(out_s, out_d, BLOCK_S, BLOCK_D),
        num_queries - s0, out, D, BLOCK_S, BLOCK_D,
    )  # fmt: skip
    tl.store(lse_at + (b * (H * G) + q) * num_queries + rows, lse, mask=rows < num_queries)


@triton.jit
def d_queries_(
    queries_at, keys_at, values_at, gate_at, decay_at, pads_at, d_out_at, lse2_at, delta_at,
    d_queries_at,
    query_b, query_h, query_s, query_d, key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    gate_b, gate_h, gate_t, decay_b, decay_h, decay_t,
    d_out_b, d_out_h, d_out_s, d_out_d, d_query_b, d_query_h, d_query_s, d_query_d,
    H, G, num_queries, num_keys, padded, num_blocks, scaling, scale, cap, protected,
    HAS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of queries of one query head."""
    block, b, h, member = _place(tl.program_id(0), num_blocks, H, G, True)
    q = h * G + member
    keys_at += b * key_b + h * key_h
    values_at += b * value_b + h * value_h
    if _has(HAS, GATE):
        gate_at += b * gate_b + h * gate_h
    if _has(HAS, DECAY):
        decay_at += b * decay_b + h * decay_h
    pads = 0
    if _has(HAS, PADS):
        pads = tl.load(pads_at + b).to(tl.int32)
    s0 = block * BLOCK_S
    j0 = num_keys - num_queries + s0
    queries = _load(
        _row(queries_at + b * query_b + q * query_h, s0, query_s),
        _offsets(query_s, query_d, BLOCK_S, BLOCK_D), num_queries - s0, D, BLOCK_S, BLOCK_D, WHOLE, UPCAST,
    )  # fmt: skip
    d_out = _load(
        _row(d_out_at + b * d_out_b + q * d_out_h, s0, d_out_s),
        _offsets(d_out_s, d_out_d, BLOCK_S, BLOCK_D), num_queries - s0, D, BLOCK_S, BLOCK_D, WHOLE, UPCAST,
    )  # fmt: skip
    at = (b * (H * G) + q) * padded + s0 + tl.arange(0, BLOCK_S)
    lse2 = tl.load(lse2_at + at)
    delta = tl.load(delta_at + at)
    key_offsets = _offsets(key_t, key_d, BLOCK_T, BLOCK_D)
    value_offsets = _offsets(value_t, value_d, BLOCK_T, BLOCK_D)
    d_queries = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    near, open, diagonal, end = _key_bounds(j0, num_keys, protected, BLOCK_S, BLOCK_T)
    local = tl.arange(0, BLOCK_S)
    for i0 in range(0, end, BLOCK_T):
        tested = i0 >= diagonal
        if _has(HAS, GATE | DECAY):
            tested |= (i0 >= near) & (i0 < open)
        if _has(HAS, PADS):
            tested |= i0 < pads
        keys_i = i0 + tl.arange(0, BLOCK_T)
        keys = _load(keys_at, key_offsets, num_keys - i0, D, BLOCK_T, BLOCK_D, WHOLE, UPCAST)
        keys_at += BLOCK_T * key_t
        product = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        gate, decay = _key_bias(gate_at, decay_at, gate_t, decay_t, keys_i, j0, num_keys, HAS)
        logits, tanh = _logits(
            product, (j0 + local)[:, None], keys_i[None, :], local[:, None],
            gate[None, :], decay[None, :], tested, i0 < near, pads, scale, cap, protected, HAS,
        )  # fmt: skip
        weights = tl.exp2(logits - lse2[:, None])
        values = _load(values_at, value_offsets, num_keys - i0, D, BLOCK_T, BLOCK_D, WHOLE, UPCAST)
        values_at += BLOCK_T * value_t
        d_weights = tl.dot(d_out, tl.trans(values), input_precision=PRECISION)
        d_logits = weights * (d_weights - delta[:, None])
        if _has(HAS, CAP):
            d_logits *= 1.0 - tanh * tanh
        d_queries = tl.dot(d_logits.to(keys.dtype), keys, d_queries, input_precision=PRECISION)
    _store(
        _row(d_queries_at + b * d_query_b + q * d_query_h, s0, d_query_s),
        _offsets(d_query_s, d_query_d, BLOCK_S, BLOCK_D), num_queries - s0, d_queries * scaling,
        D, BLOCK_S, BLOCK_D,
    )  # fmt: skip


@triton.jit
def d_keys_(
    queries_at, keys_at, values_at, gate_at, decay_at, pads_at, d_out_at, lse2_at, delta_at,
    d_keys_at, d_values_at, d_gate_at, d_decay_at,
    query_b, query_h, query_s, query_d, key_b, key_h, key_t, key_d, value_b, value_h, value_t, value_d,
    gate_b, gate_h, gate_t, decay_b, decay_h, decay_t,
    d_out_b, d_out_h, d_out_s, d_out_d,
    d_key_b, d_key_h, d_key_t, d_key_d, d_value_b, d_value_h, d_value_t, d_value_d,
    H, G, num_queries, num_keys, padded, num_blocks, scaling, scale, cap, protected,
    HAS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys of one KV head, and of its values, gates and decays."""
    block, b, h, _ = _place(tl.program_id(0), num_blocks, H, 1, False)
    i0 = block * BLOCK_T
    keys_i = i0 + tl.arange(0, BLOCK_T)
    before = num_keys - num_queries
    keys = _load(
        _row(keys_at + b * key_b + h * key_h, i0, key_t), _offsets(key_t, key_d, BLOCK_T, BLOCK_D),
        num_keys - i0, D, BLOCK_T, BLOCK_D, WHOLE, UPCAST,
    )  # fmt: skip
    values = _load(
        _row(values_at + b * value_b + h * value_h, i0, value_t),
        _offsets(value_t, value_d, BLOCK_T, BLOCK_D), num_keys - i0, D, BLOCK_T, BLOCK_D, WHOLE, UPCAST,
    )  # fmt: skip
    if _has(HAS, GATE):
        gate_at += b * gate_b + h * gate_h
    if _has(HAS, DECAY):
        decay_at += b * decay_b + h * decay_h
    pads = 0
    if _has(HAS, PADS):
        pads = tl.load(pads_at + b).to(tl.int32)
    # Blocks of queries that see one of these keys, nearest first: from where all see all, from where one is
    # gated and from where all are.
    low = tl.maximum(i0 - before, 0) // BLOCK_S * BLOCK_S
    last = tl.minimum(i0 + BLOCK_T, num_keys) - 1
    diagonal = last - before
    open = tl.maximum(i0 + protected - before, 0) // BLOCK_S * BLOCK_S
    far = last + protected - before
    anchor = before + low
    gate, decay = _key_bias(gate_at, decay_at, gate_t, decay_t, keys_i, anchor, num_keys, HAS)
    query_offsets = _offsets(query_s, query_d, BLOCK_S, BLOCK_D)
    d_out_offsets = _offsets(d_out_s, d_out_d, BLOCK_S, BLOCK_D)
    d_keys = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    d_values = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    d_gate = tl.zeros([BLOCK_T], tl.float32)
    d_decay = tl.zeros([BLOCK_T], tl.float32)
    for member in range(0, G):
        q = h * G + member
        # Pointers that move on take fewer registers than those that are made anew.
        head_queries_at = _row(queries_at + b * query_b + q * query_h, low, query_s)
        head_d_out_at = _row(d_out_at + b * d_out_b + q * d_out_h, low, d_out_s)
        row = (b * (H * G) + q) * padded
        for s0 in range(low, num_queries, BLOCK_S):
            tested = s0 < diagonal
            gated = s0 >= far
            if _has(HAS, GATE | DECAY):
                tested |= (s0 >= open) & (s0 < far)
            if _has(HAS, PADS):
                tested |= i0 < pads
            rows = s0 + tl.arange(0, BLOCK_S)
            queries = _load(
                head_queries_at, query_offsets, num_queries - s0, D, BLOCK_S, BLOCK_D, WHOLE, UPCAST
            )
            head_queries_at += BLOCK_S * query_s
            lse2 = tl.load(lse2_at + row + rows)
            # Keys are rows here, and queries columns.
            product = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            local = rows - low
            logits, tanh = _logits(
                product, (before + rows)[None, :], keys_i[:, None], local[None, :],
                gate[:, None], decay[:, None], tested, gated, pads, scale, cap, protected, HAS,
            )  # fmt: skip
            weights = tl.exp2(logits - lse2[None, :])
            d_out = _load(head_d_out_at, d_out_offsets, num_queries - s0, D, BLOCK_S, BLOCK_D, WHOLE, UPCAST)
            head_d_out_at += BLOCK_S * d_out_s
            d_values = tl.dot(weights.to(d_out.dtype), d_out, d_values, input_precision=PRECISION)
            delta = tl.load(delta_at + row + rows)
            # The product begins at what is subtracted, which so needs no registers beside it.
            d_weights = tl.zeros([BLOCK_T, BLOCK_S], tl.float32) - delta[None, :]
            d_logits = weights * tl.dot(values, tl.trans(d_out), d_weights, input_precision=PRECISION)
            # The decay's sum counts from the anchor too, and is put right by the gate's in the end.
            # Two ifs: the first is decided when the kernel is compiled, the second when it runs.
            if _has(HAS, GATE | DECAY):  # noqa: SIM102
                if s0 >= open:
                    part = d_logits
                    if s0 < far:
                        outside = (before + rows - protected)[None, :] >= keys_i[:, None]
                        part = tl.where(outside, part, 0.0)
                    d_gate += tl.sum(part, 1)
                    if _has(HAS, DECAY):
                        d_decay += tl.sum(part * local[None, :].to(tl.float32), 1)
            if _has(HAS, CAP):
                d_logits *= 1.0 - tanh * tanh
            d_keys = tl.dot(d_logits.to(queries.dtype), queries, d_keys, input_precision=PRECISION)
    _store(
        _row(d_keys_at + b * d_key_b + h * d_key_h, i0, d_key_t),
        _offsets(d_key_t, d_key_d, BLOCK_T, BLOCK_D), num_keys - i0, d_keys * scaling, D, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    _store(
        _row(d_values_at + b * d_value_b + h * d_value_h, i0, d_value_t),
        _offsets(d_value_t, d_value_d, BLOCK_T, BLOCK_D), num_keys - i0, d_values, D, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    at = (b * H + h) * num_keys + keys_i
    if _has(HAS, GATE):
        tl.store(d_gate_at + at, d_gate, mask=keys_i < num_keys)
    if _has(HAS, DECAY):
        d_decay += (anchor - keys_i).to(tl.float32) * d_gate
        tl.store(d_decay_at + at, d_decay, mask=keys_i < num_keys)
