"""A decoding step as one launch: append, attention in parts of rows, and their combination.

Programs, as many as the device runs at once, walk a table of items: parts of rows of so many entries. Table
and sizes lie on the device, so that neither the grid nor an argument depends on lengths, and nothing is read
back. The program in whose part a row's end lies writes the new entry, and takes it from its registers: nobody
reads in this launch what was written in it. Of a row in several parts the last program to arrive combines
them, in the row's order, whoever came when.

Entries held as codes have other items, whose rows count from the number of rows on: parts of the same rows,
before those of the pool.
"""

# Kernels are annotated where it means something to Triton: `tl.constexpr`.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from retain.kernels.ragged_attention.codes_tile import coded_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(logits, cap, CAPPED: tl.constexpr):
    """`cap * tanh(logits)` of logits that were divided by the cap; they stay without one."""
    if CAPPED:
        return cap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E)) + 1.0))
    return logits


@triton.jit
def _attended(
    top_g, sum_g, out_gx, q_gd, k_nd, v_nx, seen_n, weight_n, scale, cap,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The online softmax over some more entries, of which those of `seen_n` are seen."""
    if UPCAST:
        q_gd, k_nd, v_nx = q_gd.to(tl.float32), k_nd.to(tl.float32), v_nx.to(tl.float32)
        dots_gn = tl.dot(q_gd, tl.trans(k_nd), input_precision="ieee")
    else:
        dots_gn = tl.dot(q_gd, tl.trans(k_nd), input_precision=PRECISION)
    logits_gn = _capped(dots_gn * scale, cap, CAPPED) + weight_n[None, :] * LOG2E
    logits_gn = tl.where(seen_n[None, :], logits_gn, float("-inf"))
    higher_g = tl.maximum(top_g, tl.max(logits_gn, 1))
    # All may be out of the window; a difference of infinities is no number.
    from_g = tl.where(higher_g == float("-inf"), 0.0, higher_g)
    share_gn = tl.exp2(logits_gn - from_g[:, None])
    old_g = tl.exp2(top_g - from_g)
    sum_g = sum_g * old_g + tl.sum(share_gn, 1)
    out_gx = out_gx * old_g[:, None]
    if UPCAST:
        out_gx += tl.dot(share_gn, v_nx, input_precision="ieee")
    else:
        out_gx = tl.dot(share_gn.to(v_nx.dtype), v_nx, out_gx, input_precision=PRECISION)
    return higher_g, sum_g, out_gx


@triton.jit(do_not_specialize=["max_items", "num_slots", "window", "num_rows"])
def step(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, positions_ptr, offsets_ptr, base_ptr, clock_ptr, last_ptr,
    weight_ptr, sinks_ptr, items_ptr, count_ptr, parts_ptr, arrived_ptr, out_ptr,
    coded_keys_ptr, coded_values_ptr, value_scales_ptr, groups_ptr, key_scales_ptr, coded_offsets_ptr,
    coded_held_ptr, coded_weight_ptr, num_rows,
    scale, cap, window, max_items, num_slots, H, q_b, q_h, k_b, k_h, v_b, v_h,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHTED: tl.constexpr, SUNK: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A layer. `scale`: of logits in powers of two; divided by the cap, where there is one. `parts`: of
    each slot the maxima and the sums of its G heads, and their G values."""
    now = tl.load(clock_ptr)
    num_items = tl.load(count_ptr)
    entries = tl.load(count_ptr + 1)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    x = tl.arange(0, BLOCK_V)
    real_g = g < G
    real_gd = real_g[:, None] & (d < D)[None, :]
    real_gx = real_g[:, None] & (x < V)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        row = tl.load(items_ptr + item)
        begin = tl.load(items_ptr + max_items + item)
        slot = tl.load(items_ptr + 2 * max_items + item)
        first_slot = slot - begin // entries
        coded = row >= num_rows
        row = row % num_rows
        length = (tl.load(base_ptr + row) + now).to(tl.int32)
        held = length
        coded_parts = 0
        if BITS:
            coded_held = tl.load(coded_held_ptr + row)
            coded_start = tl.load(coded_offsets_ptr + row)
            coded_room = (tl.load(coded_offsets_ptr + row + 1) - coded_start).to(tl.int32)
            coded_parts = (coded_held + entries - 1) // entries
            held = tl.where(coded, coded_held, length)
            first_slot -= tl.where(coded, 0, (coded_room + entries - 1) // entries)
        if begin < held:
            b = row // H
            h = row % H
            start = tl.load(offsets_ptr + row)
            position = (tl.load(last_ptr + b) + now).to(tl.int32)
            heads_g = (h * G + g).to(tl.int64)
            q_at = q_ptr + b.to(tl.int64) * q_b + heads_g * q_h
            q_gd = tl.load(q_at[:, None] + d[None, :], mask=real_gd, other=0.0)
            stop = tl.minimum(begin + entries, held)
            top_g = tl.full([BLOCK_G], float("-inf"), tl.float32)
            sum_g = tl.zeros([BLOCK_G], tl.float32)
            out_gx = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
            if BITS:
                for first in range(begin, tl.where(coded, stop, begin), BLOCK_N):
                    n = first + tl.arange(0, BLOCK_N)
                    at_n = coded_start + n
                    seen_n = n < stop
                    weight_n = tl.zeros([BLOCK_N], tl.float32)
                    if WEIGHTED:
                        weight_n = tl.load(coded_weight_ptr + at_n, mask=seen_n, other=0.0)
                    k_nd = coded_tile(
                        coded_keys_ptr + coded_start * ((D * BITS + 7) // 8), n, (D * BITS + 7) // 8, 1,
                        key_scales_ptr, groups_ptr + coded_start, stop, BLOCK_D, D, BITS, 1, True,
                    )  # fmt: skip
                    v_nx = coded_tile(
                        coded_values_ptr + coded_start * ((V * BITS + 7) // 8), n, (V * BITS + 7) // 8, 1,
                        value_scales_ptr + coded_start * (2 * ((V + SPAN - 1) // SPAN)), None, stop,
                        BLOCK_V, V, BITS, SPAN, True,
                    )  # fmt: skip
                    if not UPCAST:
                        k_nd, v_nx = k_nd.to(q_gd.dtype), v_nx.to(q_gd.dtype)
                    top_g, sum_g, out_gx = _attended(
                        top_g, sum_g, out_gx, q_gd, k_nd, v_nx, seen_n, weight_n, scale, cap, CAPPED,
                        PRECISION, UPCAST,
                    )  # fmt: skip
            if (stop == length) & (coded == 0):
                new_k = tl.load(k_ptr + b.to(tl.int64) * k_b + h * k_h + d, mask=d < D, other=0.0)
                new_v = tl.load(v_ptr + b.to(tl.int64) * v_b + h * v_h + x, mask=x < V, other=0.0)
                new_at = start + length - 1
                tl.store(keys_ptr + new_at * D + d, new_k, mask=d < D)
                tl.store(values_ptr + new_at * V + x, new_v, mask=x < V)
                tl.store(positions_ptr + new_at, position)
                dots_g = tl.sum(q_gd.to(tl.float32) * new_k.to(tl.float32)[None, :], 1)
                top_g = _capped(dots_g * scale, cap, CAPPED)
                sum_g += 1.0
                out_gx += new_v.to(tl.float32)[None, :]
            for first in range(begin, tl.where(coded, begin, stop), BLOCK_N):
                n = first + tl.arange(0, BLOCK_N)
                seen_n = (n < stop) & (n < length - 1)
                at_n = start + n
                if WINDOWED:
                    at = tl.load(positions_ptr + at_n, mask=seen_n, other=-2147483647)
                    seen_n = seen_n & (at > position - window)
                weight_n = tl.zeros([BLOCK_N], tl.float32)
                if WEIGHTED:
                    weight_n = tl.load(weight_ptr + at_n, mask=seen_n, other=0.0)
                keys_at = keys_ptr + at_n[:, None] * D + d[None, :]
                k_nd = tl.load(keys_at, mask=seen_n[:, None] & (d < D)[None, :], other=0.0)
                values_at = values_ptr + at_n[:, None] * V + x[None, :]
                v_nx = tl.load(values_at, mask=seen_n[:, None] & (x < V)[None, :], other=0.0)
                top_g, sum_g, out_gx = _attended(
                    top_g, sum_g, out_gx, q_gd, k_nd, v_nx, seen_n, weight_n, scale, cap, CAPPED, PRECISION,
                    UPCAST,
                )  # fmt: skip
            num_parts = coded_parts + (length + entries - 1) // entries
            ends = num_parts == 1
            if not ends:
                part_g = slot.to(tl.int64) * G + g
                tl.store(parts_ptr + part_g, top_g, mask=real_g)
                tl.store(parts_ptr + num_slots * G + part_g, sum_g, mask=real_g)
                part_at = parts_ptr + 2 * num_slots * G + part_g[:, None] * V + x[None, :]
                tl.store(part_at, out_gx, mask=real_gx)
                tl.debug_barrier()  # the parts of all threads are written before one of them says so
                came = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
                if came == num_parts - 1:
                    tl.store(arrived_ptr + row, 0)  # for the next layer, and the next step
                    ends = True
                    top_g = tl.full([BLOCK_G], float("-inf"), tl.float32)
                    sum_g = tl.zeros([BLOCK_G], tl.float32)
                    out_gx = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
                    for part in range(0, num_parts):
                        at_slot = first_slot + part
                        if BITS:  # slots of codes that no entry has come to are left out
                            behind = (coded_room + entries - 1) // entries - coded_parts
                            at_slot += tl.where(part < coded_parts, 0, behind)
                        at_g = at_slot.to(tl.int64) * G + g
                        its_g = tl.load(
                            parts_ptr + at_g, mask=real_g, other=float("-inf"), cache_modifier=".cg"
                        )
                        its_sum = parts_ptr + num_slots * G + at_g
                        its_sum_g = tl.load(its_sum, mask=real_g, other=0.0, cache_modifier=".cg")
                        its_values = parts_ptr + 2 * num_slots * G + at_g[:, None] * V + x[None, :]
                        its_gx = tl.load(its_values, mask=real_gx, other=0.0, cache_modifier=".cg")
                        higher_g = tl.maximum(top_g, its_g)
                        from_g = tl.where(higher_g == float("-inf"), 0.0, higher_g)
                        old_g = tl.exp2(top_g - from_g)
                        new_g = tl.exp2(its_g - from_g)
                        sum_g = sum_g * old_g + its_sum_g * new_g
                        out_gx = out_gx * old_g[:, None] + its_gx * new_g[:, None]
                        top_g = higher_g
            if ends:
                if SUNK:
                    sink_g = tl.load(sinks_ptr + heads_g, mask=real_g, other=0.0).to(tl.float32) * LOG2E
                    higher_g = tl.maximum(top_g, sink_g)
                    old_g = tl.exp2(top_g - higher_g)
                    sum_g = sum_g * old_g + tl.exp2(sink_g - higher_g)
                    out_gx = out_gx * old_g[:, None]
                to_g = out_ptr + (b.to(tl.int64) * (H * G) + heads_g) * V
                sum_g = tl.where(real_g, sum_g, 1.0)
                found_gx = (out_gx / sum_g[:, None]).to(out_ptr.dtype.element_ty)
                tl.store(to_g[:, None] + x[None, :], found_gx, mask=real_gx)
