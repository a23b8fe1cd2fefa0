"""Triton kernels of attention over ragged rows: work items attend parts of rows, and parts are combined.

- `attend`: one program an item of `work` and block of queries: the online softmax over the item's keys.
- `combine`: one program a query of a row that was cut: parts are weighted by their maxima and sums.

The G x S queries of a KV head are the rows of one matrix, so that each key and each value is loaded once for
the whole group, and work is cut by entries, so that no program waits for a longer row. Nothing is read back:
the host knows the rooms, and the entries held in them are looked up on the device. Logits are in units of
log 2, since the exponential of the hardware is `exp2`.
"""

# mypy: disable-error-code="no-untyped-def"
# (Arguments of kernels are typed by Triton.)

import triton
import triton.language as tl

from retain.kernels.ragged_attention.codes_tile import coded_tile

LOG2E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
# Arguments that follow the number of queries; kernels are not compiled anew for them.
OF_A_CALL = ("num_queries", "seen_r")


@triton.jit
def _tile(at, row_n, stride_row, column_d, stride_column, stop, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """`[N, D]` of the store, zeros beyond `stop` (if MASKED) and beyond its width."""
    where = at + row_n.to(tl.int64)[:, None] * stride_row + column_d.to(tl.int64)[None, :] * stride_column
    if MASKED:
        if column_d.shape[0] == WIDTH:
            return tl.load(where, mask=(row_n < stop)[:, None], other=0.0)
        return tl.load(where, mask=(row_n < stop)[:, None] & (column_d < WIDTH)[None, :], other=0.0)
    if column_d.shape[0] == WIDTH:
        return tl.load(where)
    return tl.load(where, mask=(column_d < WIDTH)[None, :], other=0.0)


@triton.jit
def _over(
    top_m, sum_m, out_mv, q_md, keys_at, values_at, key_scales, key_groups, value_scales,
    weights_at, seen_m, start, stop, scale, cap, k_c, k_d, v_c, v_d, weights_c,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    WEIGHTED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The online softmax over entries `start .. stop` of a row; without MASKED all are seen, by all."""
    d = tl.arange(0, q_md.shape[1])
    v = tl.arange(0, out_mv.shape[1])
    for first in range(start, stop, N):
        entry_n = first + tl.arange(0, N)
        if BITS:
            k_nd = coded_tile(
                keys_at, entry_n, k_c, k_d, key_scales, key_groups, stop, d.shape[0], D, BITS, 1, MASKED
            ).to(q_md.dtype)
        else:
            k_nd = _tile(keys_at, entry_n, k_c, d, k_d, stop, D, MASKED)
        if UPCAST:
            k_nd = k_nd.to(tl.float32)
        logit_mn = tl.dot(q_md, tl.trans(k_nd), input_precision=PRECISION) * scale  # in units of log 2
        if CAPPED:
            # tanh, without overflow: exp(2x) may be infinite, and the quotient then is 0.
            logit_mn = cap * (1.0 - 2.0 / (tl.exp2(logit_mn * 2.8853900817779268) + 1.0))
        if WEIGHTED:
            where = weights_at + entry_n.to(tl.int64) * weights_c
            weight_n = tl.load(where, mask=entry_n < stop, other=0.0) if MASKED else tl.load(where)
            logit_mn += weight_n[None, :] * LOG2E
        if MASKED:
            logit_mn = tl.where(entry_n[None, :] < seen_m[:, None], logit_mn, float("-inf"))
        higher_m = tl.maximum(top_m, tl.max(logit_mn, 1))
        from_m = higher_m
        if MASKED:  # a query may see nothing of it, and -inf less -inf is nothing to go on with
            from_m = tl.where(higher_m == float("-inf"), 0.0, higher_m)
        prob_mn = tl.exp2(logit_mn - from_m[:, None])
        scale_m = tl.exp2(top_m - from_m)
        sum_m = sum_m * scale_m + tl.sum(prob_mn, 1)
        out_mv = out_mv * scale_m[:, None]
        if BITS:
            v_nv = coded_tile(
                values_at, entry_n, v_c, v_d, value_scales, None, stop, v.shape[0], DV, BITS, SPAN,
                MASKED,
            ).to(q_md.dtype)  # fmt: skip
        else:
            v_nv = _tile(values_at, entry_n, v_c, v, v_d, stop, DV, MASKED)
        if UPCAST:
            v_nv = v_nv.to(tl.float32)
        out_mv = tl.dot(prob_mn.to(v_nv.dtype), v_nv, out_mv, input_precision=PRECISION)
        top_m = higher_m
    return top_m, sum_m, out_mv


@triton.jit
def _with_sink(top_m, sum_m, sink_m):
    """The softmax with one more logit: what it is relative to, its sum, and the factor on what was summed."""
    higher_m = tl.maximum(top_m, sink_m)
    from_m = tl.where(higher_m == float("-inf"), 0.0, higher_m)
    scale_m = tl.exp2(top_m - from_m)
    return higher_m, sum_m * scale_m + tl.exp2(sink_m - from_m), scale_m


@triton.jit(do_not_specialize=["num_items", "num_parts", "item_entries", "blocks", *OF_A_CALL])
def attend(
    queries, keys, values, offsets, seen, sinks, weights, items, out, parts,
    scale, cap, num_items, num_parts, item_entries, blocks, heads, group, num_queries,
    q_b, q_q, q_s, q_d, k_c, k_d, v_c, v_d, seen_r, seen_s,
    weights_c, o_b, o_q, o_s, key_scales, key_groups, value_scales, lse,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """An item of a row, one block of its queries: m = s * G + g."""
    item = tl.program_id(0) // blocks
    row = tl.load(items + item)
    begin = tl.load(items + num_items + item)
    slot = tl.load(items + 2 * num_items + item)
    m = (tl.program_id(0) % blocks) * M + tl.arange(0, M)
    real_m = m < group * num_queries
    s, g = m // group, m % group
    seen_at = seen + row.to(tl.int64) * seen_r + s.to(tl.int64) * seen_s
    seen_m = tl.load(seen_at, mask=real_m, other=0).to(tl.int32)
    stop = tl.minimum(begin + item_entries, tl.max(seen_m, 0))
    if (slot >= 0) & (stop <= begin):
        return  # `combine` does not look at what nobody sees
    seen_m = tl.minimum(seen_m, stop)
    b = (row // heads).to(tl.int64)
    q = ((row % heads) * group + g).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    q_at = queries + b * q_b + q * q_q + s.to(tl.int64) * q_s
    q_md = tl.load(
        q_at[:, None] + d.to(tl.int64)[None, :] * q_d, mask=real_m[:, None] & (d < D)[None, :], other=0.0
    )
    if UPCAST:
        q_md = q_md.to(tl.float32)
    offset = tl.load(offsets + row).to(tl.int64)
    weights_at = keys
    if weights is not None:
        weights_at = weights + offset * weights_c
    top_m = tl.full([M], float("-inf"), tl.float32)
    sum_m = tl.zeros([M], tl.float32)
    out_mv = tl.zeros([M, BLOCK_V], tl.float32)
    keys_at, values_at = keys + offset * k_c, values + offset * v_c
    if BITS:
        key_groups += offset
        value_scales += offset * (2 * ((DV + SPAN - 1) // SPAN))
    # Whole blocks that every query sees need no mask.
    all_see = tl.min(tl.where(real_m, seen_m, stop), 0)
    whole = begin + tl.maximum(all_see - begin, 0) // N * N
    top_m, sum_m, out_mv = _over(
        top_m, sum_m, out_mv, q_md, keys_at, values_at, key_scales, key_groups, value_scales,
        weights_at, seen_m, begin, whole, scale, cap, k_c, k_d, v_c, v_d, weights_c, D, DV, N, False, CAPPED,
        weights is not None, PRECISION, UPCAST, BITS, SPAN,
    )  # fmt: skip
    top_m, sum_m, out_mv = _over(
        top_m, sum_m, out_mv, q_md, keys_at, values_at, key_scales, key_groups, value_scales,
        weights_at, seen_m, whole, stop, scale, cap, k_c, k_d, v_c, v_d, weights_c, D, DV, N, True, CAPPED,
        weights is not None, PRECISION, UPCAST, BITS, SPAN,
    )  # fmt: skip
    if slot >= 0:
        part_m = slot.to(tl.int64) * (group * num_queries) + m
        tl.store(parts + part_m, top_m, mask=real_m)
        tl.store(parts + num_parts + part_m, sum_m, mask=real_m)
        out_at = parts + 2 * num_parts + part_m[:, None] * DV + v[None, :]
        tl.store(out_at, out_mv, mask=real_m[:, None] & (v < DV)[None, :])
    else:
        if sinks is not None:
            sink_m = tl.load(sinks + q, mask=real_m, other=float("-inf")).to(tl.float32) * LOG2E
            top_m, sum_m, scale_m = _with_sink(top_m, sum_m, sink_m)
            out_mv = out_mv * scale_m[:, None]
        # The largest logit adds 1 to the sum: below it, nothing was seen.
        sum_m = tl.maximum(sum_m, 1.0)
        lse_at = lse + (b * (heads * group) + q) * num_queries + s  # [B, Q, S]
        tl.store(lse_at, (top_m + tl.log2(sum_m)) * LOG_2, mask=real_m)
        to_at = (out + b * o_b + q * o_q + s.to(tl.int64) * o_s)[:, None] + v[None, :]
        final_mv = (out_mv / sum_m[:, None]).to(out.dtype.element_ty)
        tl.store(to_at, final_mv, mask=real_m[:, None] & (v < DV)[None, :])


@triton.jit(do_not_specialize=["num_cut", "num_parts", "item_entries", *OF_A_CALL])
def combine(
    parts, seen, sinks, cut, out, num_cut, num_parts, item_entries, heads, group, num_queries,
    seen_r, seen_s, o_b, o_q, o_s, lse, DV: tl.constexpr, BLOCK_V: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """A query of a row of which several programs found parts: in the row's order, whenever they ran."""
    queries = group * num_queries
    which = tl.program_id(0) // queries
    m = tl.program_id(0) % queries
    row = tl.load(cut + which)
    slot = tl.load(cut + num_cut + which)
    s, g = m // group, m % group
    seen_one = tl.load(seen + row.to(tl.int64) * seen_r + s.to(tl.int64) * seen_s).to(tl.int32)
    items = (seen_one + item_entries - 1) // item_entries
    v = tl.arange(0, BLOCK_V)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out_v = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, items, I):
        i = first + tl.arange(0, I)
        part_i = (slot + i).to(tl.int64) * queries + m
        top_i = tl.load(parts + part_i, mask=i < items, other=float("-inf"))
        sum_i = tl.load(parts + num_parts + part_i, mask=i < items, other=0.0)
        out_at = parts + 2 * num_parts + part_i[:, None] * DV + v[None, :]
        part_iv = tl.load(out_at, mask=(i < items)[:, None] & (v < DV)[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(top_i, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight_i = tl.exp2(top_i - base)
        scale = tl.exp2(top - base)
        total = total * scale + tl.sum(weight_i * sum_i, 0)
        out_v = out_v * scale + tl.sum(weight_i[:, None] * part_iv, 0)
        top = higher
    b = (row // heads).to(tl.int64)
    q = ((row % heads) * group + g).to(tl.int64)
    if sinks is not None:
        sink = tl.load(sinks + q).to(tl.float32) * LOG2E
        top, total, scale = _with_sink(top, total, sink)
        out_v = out_v * scale
    total = tl.maximum(total, 1.0)
    lse_at = lse + (b * (heads * group) + q) * num_queries + s + tl.arange(0, 1)
    tl.store(lse_at, (top + tl.log2(total)) * LOG_2)
    to_at = out + b * o_b + q * o_q + s.to(tl.int64) * o_s
    tl.store(to_at + v, (out_v / total).to(out.dtype.element_ty), mask=v < DV)
