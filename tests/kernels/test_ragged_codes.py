"""`ragged_attention` over codes, with the log-sum-exp, and `merged` over stores of several precisions."""

import math

import pytest
import torch

from retain.kernels import backend
from retain.kernels.codes import decode
from retain.kernels.ragged_attention import cases, merged, ragged_attention, reference
from retain.kernels.ragged_attention.cases import KIVI_2, KIVI_4, Case, Held
from tests.close import assert_close

CASES = cases.CASES
PATHS = ["triton", "reference"]


@pytest.mark.parametrize("few", [0, 10**6], ids=["by rows", "by pages"])
def test_the_reference_never_decodes_a_whole_store(monkeypatch, few):
    monkeypatch.setattr(reference, "FEW", few)
    monkeypatch.setattr(reference, "MAX_LOGITS", 64 * 64)
    given = cases.inputs(CASES["decode, 4 bits"], torch.float32, "cpu")
    seen = []
    monkeypatch.setattr(reference, "decode", lambda part, dtype: seen.append(part) or decode(part, dtype))
    ragged_attention(**given)
    assert max(part.shape[0] for part in seen) <= (64 if few else max(CASES["decode, 4 bits"].lengths))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("span", [1, 5, 16, 33, 40])
def test_the_kernel_reads_any_bits_and_spans(bits, span):
    """Also of widths that are no multiple of a byte's codes, of a span, or of the tile."""
    held = {"keys": Held(bits), "values": Held(bits, span)}
    case = Case(1, 2, 2, 2, 21, (5, 70), value_width=33, **held, lse=True)
    with backend.using("triton"):
        assert cases.check(case, torch.float32, "cpu") is None


@pytest.mark.parametrize("sinks", [None, [0.5, float("-inf")]], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num_queries", [1, 40])
def test_a_query_that_sees_nothing_has_its_sink_alone(num_queries, path, sinks):
    given = cases.inputs(Case(1, 1, 2, num_queries, 32, (0,), lse=True), torch.float32, "cpu")
    if sinks is not None:
        given["sinks_Q"] = torch.tensor(sinks)
    with backend.using(path):
        out, lse = ragged_attention(**given)
    wanted = torch.tensor(sinks or [float("-inf")] * 2)
    assert not out.any() and torch.equal(lse, wanted[None, :, None].expand_as(lse))


# Entries of each row that lie in numbers, in 4 bits and in 2; the second row has none in the middle one.
SHARES = ((40, 70, 90), (3, 0, 65))


def stores(num_queries, dtype):
    """Three calls over the stores of the same two rows, as all queries see everything."""
    made = []
    for seed, (held, lengths) in enumerate(zip(({}, KIVI_4, KIVI_2), zip(*SHARES, strict=True), strict=True)):
        case = Case(1, 2, 2, num_queries, 20, lengths, value_width=24, **held)
        given = cases.inputs(case, dtype, "cpu", seed)
        given["seen_RS"] = given["lengths_R"][:, None].long().expand(-1, num_queries)
        given["queries_BQSD"] = (made[0] if made else given)["queries_BQSD"]
        made.append({**given, "with_lse": True})
    return made


def softmax_over_all(calls, sinks):
    """One softmax over the entries of all stores, entry by entry, in float64."""
    queries = calls[0]["queries_BQSD"].double()
    _, Q, S, _ = queries.shape
    out = torch.zeros(1, Q, S, 24, dtype=torch.float64)
    for q in range(Q):
        for s in range(S):
            mass, summed = math.exp(sinks[q]) if sinks else 0.0, torch.zeros(24, dtype=torch.float64)
            for given in calls:
                keys, values = (
                    cases.numbers_of(given[name], torch.float64) for name in ("keys_CD", "values_CD")
                )
                begin = int(given["offsets_R1"][q // 2])
                for i in range(begin, begin + int(given["lengths_R"][q // 2])):
                    weight = math.exp(given["scaling"] * float(queries[0, q, s] @ keys[i]))
                    mass, summed = mass + weight, summed + weight * values[i]
            out[0, q, s] = summed / mass
    return out


@pytest.mark.parametrize("sinks", [None, [0.5, -1.0, 3.0, 0.0]], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("path", PATHS)
def test_merged_stores_are_one_softmax_over_all_entries(path, sinks):
    calls = stores(2, torch.float32)
    with backend.using(path):
        results = [ragged_attention(**given) for given in calls]
    outs, lses = ([result[which] for result in results] for which in (0, 1))
    out = merged(outs, lses, None if sinks is None else torch.tensor(sinks))
    assert_close(out, softmax_over_all(calls, sinks))


def test_merged_in_half_precision_is_added_up_in_float32():
    draw = torch.Generator().manual_seed(0)
    outs = [torch.randn(1, 2, 3, 8, generator=draw).bfloat16() for _ in range(40)]
    lses = [torch.randn(1, 2, 3, generator=draw) for _ in range(40)]
    exact = merged([out.double() for out in outs], [lse.double() for lse in lses])
    out = merged(outs, lses)
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact.bfloat16())


def test_merged_of_nothing_seen_is_zeros_and_a_store_of_nothing_changes_nothing():
    nothing = (torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), float("-inf")))
    for sinks in (None, torch.zeros(2), torch.full((2,), float("-inf"))):
        out = merged([nothing[0]] * 2, [nothing[1]] * 2, sinks)
        assert torch.equal(out, torch.zeros_like(out))
    some = (torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1))
    assert torch.equal(merged([nothing[0], some[0]], [nothing[1], some[1]]), some[0])


def test_merged_needs_one_of_each():
    for outs, lses in (([], []), ([torch.zeros(1, 1, 1, 2)], [])):
        with pytest.raises(ValueError, match=f"{len(outs)} outputs and 0 log-sum-exps of stores"):
            merged(outs, lses)


def test_what_cannot_be_is_refused():
    given = cases.inputs(CASES["decode, 4 bits"], torch.float32, "cpu")
    keys, values = given["keys_CD"], given["values_CD"]
    count = keys.shape[0]
    for change, text in [
        ({"keys_CD": keys._replace(bits=3)}, "keys as codes whose 3 bits"),
        ({"values_CD": values._replace(span=16)}, r"values as codes whose scales are .* \[\d+, 2, 4\]"),
        ({"keys_CD": keys._replace(groups_C=keys.groups_C[:3])}, r"keys as codes whose groups are \(3,\)"),
        ({"values_CD": values.part(slice(3))}, rf"keys are \({count}, 64\) and values \(3, 64\)"),
        ({"keys_CD": values._replace(width=63)}, "keys are 63 wide and queries 64"),
        ({"keys_CD": values}, "keys as codes that share no scales by channel"),
        ({"values_CD": values._replace(groups_C=keys.groups_C)}, "values as codes that share scales with"),
    ]:
        with pytest.raises(ValueError, match=text):
            ragged_attention(**{**given, **change})
