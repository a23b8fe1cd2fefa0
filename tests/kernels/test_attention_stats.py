"""attention_stats: the reference and the kernels against a dense matrix in float64, and refusals."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from retain.kernels import attention_stats as op
from retain.kernels import backend
from retain.kernels.attention_stats import WANTED, Pool, attention_stats, cases, reference
from retain.kernels.attention_stats.cases import ALL, CASES, FLOATS, Case, inputs, run
from retain.kernels.measure import cast, check, extra_bytes
from tests.close import assert_close
from tests.kernels.device import DEVICE

MB = 10**6
# An access is right if it would be one at a threshold that is this much lower, or higher.
ROUNDING = 1e-4


def dense(
    queries_BQSD, keys_BHTD, *, scaling, wanted, queries=None, keys=None, distance=0,
    exists_BHT=None, asks_BS=None, place_BT=None, soft_cap=None, sinks_Q=None,
    log_weight_BHT=None, lse_BQS=None, least_BQS=None, pool=None, group=False,
):  # fmt: skip
    """The docstring's formulas over whole matrices in float64; a log-sum-exp that is given is made anew."""
    (B, Q, S, _), (H, T) = queries_BQSD.shape, keys_BHTD.shape[1:3]
    G = Q // H
    logits = torch.einsum("bhgsd,bhtd->bhgst", queries_BQSD.double().unflatten(1, (H, G)), keys_BHTD.double())
    logits = logits.flatten(1, 2) * scaling
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if log_weight_BHT is not None:
        logits = logits + log_weight_BHT.double().repeat_interleave(G, 1)[:, :, None]
    query = torch.arange(T - S, T)[:, None]
    entry = torch.arange(T)[None]
    place = (torch.arange(T).expand(B, T) if place_BT is None else place_BT)[:, None]
    sees = (entry <= query).expand(B, Q, S, T).clone()
    exists = torch.ones((B, H, T), dtype=torch.bool) if exists_BHT is None else exists_BHT.expand(B, H, T)
    exists = exists.repeat_interleave(G, 1)[:, :, None]
    sees &= exists
    if asks_BS is not None:
        sees &= asks_BS[:, None, :, None]
    powers = torch.where(sees, logits, -math.inf).exp()
    total = powers.sum(-1)
    if sinks_Q is not None:
        asked = 1 if asks_BS is None else asks_BS[:, None]
        total = total + sinks_Q.double().exp()[:, None] * asked
    probs = torch.where(sees, powers / total[..., None], 0.0)
    if pool is not None:
        before = probs
        probs = pooled(probs, exists, place[:, 0], pool)
    probs = torch.where(query - entry >= distance, probs, 0.0) if distance else probs
    (q0, q1), (k0, k1) = queries or (0, S), keys or (0, T)
    before = (before if pool is not None else probs)[:, :, q0:q1, k0:k1]
    probs, sees = probs[:, :, q0:q1, k0:k1], sees[:, :, q0:q1, k0:k1]
    found = {
        "max": probs.amax(2),
        "sum": probs.sum(2),
        "scatter": (probs - probs.mean(2, keepdim=True)).square().sum(2),
        "plain": before.sum(2),
        "entropy": -(probs * (probs + 1e-10).log()).sum(2),
        "lse": total.log()[:, :, q0:q1],
    }
    if group:
        for name in ("max", "sum", "scatter", "entropy", "plain"):
            each = found[name].unflatten(1, (H, G))
            found[name] = each.amax(2) if name == "max" else each.sum(2)
    return found


def pooled(probs, exists, place_BT, pool):
    """Neighbour by neighbour, entry by entry."""
    (B, _, _, T), after = probs.shape, torch.zeros_like(probs)
    for b in range(B):
        for i in range(T):
            same = range(pool.split) if i < pool.split else range(pool.split, T)
            near = [k for k in same if abs(int(place_BT[b, k] - place_BT[b, i])) <= pool.size // 2]
            part = probs[b, ..., near]
            after[b, ..., i] = part.sum(-1) / pool.size if pool.kind == "avg" else part.amax(-1)
    after = torch.where(exists, after, 0.0)
    if pool.keep_mass:
        for side in (slice(0, pool.split), slice(pool.split, None)):
            mass = after[..., side].sum(-1, keepdim=True)
            after[..., side] *= probs[..., side].sum(-1, keepdim=True) / torch.where(mass > 0, mass, 1.0)
    return after


def assert_right(found, kwargs, ops=4):
    """Wanted statistics, to float32's floor: also of half precision, whose products are exact."""
    kwargs = moved(kwargs, "cpu")
    exact = dense(**kwargs)
    for name in kwargs["wanted"]:
        actual = getattr(found, name).cpu()
        if name == "last":
            assert actual.dtype == torch.int64
            assert not wrong_last(actual, kwargs)
            continue
        # The entropy of a certainty is nothing, but its rounding is that of the probability, 1.
        least = exact["sum"] if name == "entropy" else 0.0
        kind = torch.promote_types(kwargs["keys_BHTD"].dtype, torch.float32)
        assert actual.dtype == kind, name
        assert_close(actual + least, exact[name] + least, dtype=kind, ops=ops)
    for name in {*WANTED} - {*kwargs["wanted"]}:
        assert getattr(found, name) is None


def wrong_last(last, kwargs):
    """Last accesses that differ: a probability at the very threshold may count as either."""
    bounds = []
    for factor in (1 + ROUNDING, 1 - ROUNDING):
        moved_kwargs = {**cast(kwargs, torch.float64), "wanted": "last"}
        moved_kwargs["least_BQS"] = moved_kwargs["least_BQS"] * factor
        bounds.append(attention_stats(**moved_kwargs).last)
    return int(((last < bounds[0]) | (last > bounds[1])).sum())


def moved(kwargs, device):
    """The same arguments elsewhere: the oracle reckons on the CPU."""
    return {name: one.to(device) if torch.is_tensor(one) else one for name, one in kwargs.items()}


def by_kernels(kwargs):
    with backend.using("triton"):
        return attention_stats(**kwargs)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_formula(name, dtype, chunk):
    """And the benchmark's check agrees."""
    assert check(cases, CASES[name], dtype, "cpu") is None
    kwargs = inputs(CASES[name], dtype, "cpu")
    assert_right(attention_stats(**kwargs, chunk=chunk), kwargs)


@pytest.mark.parametrize("name", CASES)
def test_log_weights_are_added_to_logits(name):
    kwargs = inputs(CASES[name], torch.float64, DEVICE)
    kwargs = {key: actual for key, actual in kwargs.items() if key != "lse_BQS"}
    (B, H, T, _), draw = kwargs["keys_BHTD"].shape, torch.Generator(device=DEVICE).manual_seed(3)
    plain = attention_stats(**kwargs)
    weights = torch.randint(1, 30, (B, H, T), generator=draw, device=DEVICE).float().log()
    found = attention_stats(**kwargs, log_weight_BHT=weights)
    assert_right(found, {**kwargs, "log_weight_BHT": weights})
    assert any(not torch.equal(getattr(found, actual), getattr(plain, actual)) for actual in kwargs["wanted"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_formula(name, dtype):
    kwargs = inputs(CASES[name], dtype, DEVICE, seed=1)
    assert_right(by_kernels(kwargs), kwargs)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "last" in case.wanted])
def test_last_is_the_last_of_a_loop(name):
    """The oracle of last accesses, which `wrong_last` takes from the reference in float64."""
    case = CASES[name]
    kwargs = inputs(case, torch.float64, "cpu")
    (B, Q, S, _), (H, T) = kwargs["queries_BQSD"].shape, kwargs["keys_BHTD"].shape[1:3]
    least = kwargs.pop("least_BQS")
    k0, k1 = kwargs["keys"] or (0, T)
    wanted = torch.full((B, Q, k1 - k0), -1)
    for s in range(S):
        probs = dense(**{**kwargs, "queries": (s, s + 1), "group": False})["max"]
        wanted[(probs >= least[:, :, s, None]) & (probs > 0)] = T - S + s
    if case.group:
        wanted = wanted.unflatten(1, (H, -1)).amax(2)
    assert torch.equal(attention_stats(**{**kwargs, "wanted": "last"}, least_BQS=least).last, wanted)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_zero_is_enough_of_what_is_seen_and_of_nothing_else(path):
    kwargs = inputs(Case(batch=2, entries=40, padding=7, held=0.6, width=16), torch.float32, DEVICE)
    kwargs["least_BQS"] = torch.zeros_like(kwargs["least_BQS"])
    with backend.using(path):
        last = attention_stats(**kwargs).last.cpu()
    asks, exists = kwargs["asks_BS"].cpu(), kwargs["exists_BHT"].cpu().repeat_interleave(2, 1)
    for entry in range(40):
        for b in range(2):
            seers = [j for j in range(entry, 40) if asks[b, j]]
            wanted = torch.where(exists[b, :, entry], max(seers, default=-1), -1)
            assert torch.equal(last[b, :, entry], wanted)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"given_lse": True},
        {"wanted": ("max",)},
        {"num_queries": 46, "wanted": cases.POOLED, "pool": Pool("avg", 3, 20, True)},
        {"num_queries": 46, "wanted": cases.POOLED, "pool": Pool("max", 3, 20), "group": True},
    ],
)
def test_what_lies_where_nothing_exists_reaches_nothing(path, changed):
    """Neither keys that a head does not hold nor queries that are not there, whatever lies before them."""
    case = replace(Case(batch=2, entries=50, padding=8, held=0.6, width=16), **changed)
    kwargs = inputs(case, torch.float32, DEVICE)
    kwargs["asks_BS"][:, 1::3] = False
    with backend.using(path):
        before = attention_stats(**kwargs)
        kwargs["keys_BHTD"][~kwargs["exists_BHT"]] = math.nan
        kwargs["queries_BQSD"].transpose(1, 2)[~kwargs["asks_BS"]] = math.nan
        after = attention_stats(**kwargs)
    for name in kwargs["wanted"]:
        assert torch.equal(getattr(before, name), getattr(after, name)), name


def test_first_query_moves_the_queries():
    """Queries that are not the last ones are what they would be if nothing came after."""
    kwargs = inputs(Case(entries=50, num_queries=20, wanted=FLOATS, width=16), torch.float32, DEVICE)
    keys = kwargs.pop("keys_BHTD")
    for path in ("reference", "triton"):
        with backend.using(path):
            found = attention_stats(**kwargs, keys_BHTD=keys, first_query=11)
            alone = attention_stats(**kwargs, keys_BHTD=keys[:, :, :31])
        for name in ("max", "sum", "entropy"):
            every = getattr(found, name)
            assert_close(every[..., :31], getattr(alone, name).double())
            assert not every[..., 31:].any()
        assert_close(found.lse, alone.lse.double())


def test_no_gradient_flows():
    kwargs = inputs(CASES["plain"], torch.float32, DEVICE)
    kwargs["queries_BQSD"].requires_grad_()
    found = run(CASES["plain"], kwargs)
    assert not any(getattr(found, name).requires_grad for name in ALL)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"queries_BQSD": torch.zeros(1, 3, 20, 8)}, r"Q is a multiple of H; got queries \[1, 3, 20, 8\]"),
        ({"wanted": ("max", "mean")}, "wanted is one or more of max, sum, scatter, .*; got mean"),
        ({"first_query": 21}, "query 0 sits at entry 21, and 20 queries end at 41, of 40 entries"),
        ({"exists_BHT": torch.ones(1, 2, 40)}, "exists_BHT is torch.bool; got torch.float32"),
        ({"asks_BS": torch.ones(1, 40).bool()}, r"asks_BS is \[1, 20\] here; got \[1, 40\]"),
        ({"pool": Pool("avg", 5, 20), "distance": 1}, "leave out 'last' and distance, or the pool"),
        ({"pool": Pool("avg", 5, 20), "wanted": "scatter"}, "pooled rows have no 'scatter' here"),
        ({"wanted": ("max", "plain")}, "'plain' is the sum before rows are pooled: name a pool"),
    ],
)
def test_what_is_refused(change, text):
    given = {"queries_BQSD": torch.zeros(1, 4, 20, 8), "keys_BHTD": torch.zeros(1, 2, 40, 8), "scaling": 1.0}
    with pytest.raises(ValueError, match=text):
        attention_stats(**{**given, **change})


@pytest.mark.parametrize(
    ("width", "scaling", "why"),
    [
        (257, 0.1, "a head width of 257"),
        (16, -0.1, "scaling of -0.1"),
        (1, 0.1, "rows 4194304 elements apart"),
    ],
)
def test_what_the_kernels_leave_to_the_reference(width, scaling, why):
    queries, keys = (torch.randn(1, 2, 4, width, device=DEVICE) for _ in range(2))
    if width == 1:
        keys = keys.as_strided((1, 2, 4, 1), (0, 4, 1, 2**22))
    found = attention_stats(queries, keys, scaling=scaling, wanted="sum").sum
    assert_close(found.cpu(), dense(queries.cpu(), keys.cpu(), scaling=scaling, wanted=("sum",))["sum"])
    with backend.using("triton"), pytest.raises(ValueError, match=why):
        attention_stats(queries, keys, scaling=scaling)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", ["plain", "held per head", "G = 8, D = 33", "pool max"])
def test_heads_are_spread_over_threads(name, number):
    """If there are enough of them; a thread computes alone, and the caller keeps its number."""
    kwargs, calls = inputs(CASES[name], torch.float32, "cpu"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "_run", lambda call: calls.append(call) or {})
        attention_stats(**kwargs)
    torch.set_num_threads(number)
    pairs = min(number, CASES[name].batch * CASES[name].kv_heads)
    assert reference._Walk(calls[0]).workers == (pairs if 2 * pairs > number else 1)
    with torch.inference_mode():
        found = [attention_stats(**kwargs, chunk=chunk) for chunk in (None, 7, 7)]
    assert torch.get_num_threads() == number
    for stats in found:
        assert_right(stats, kwargs)
    assert all(torch.equal(getattr(found[1], each), getattr(found[2], each)) for each in kwargs["wanted"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_holds_little_at_any_length(dtype):
    """128K entries, whose keys alone are 67 MB a head in float32: also they are made a tile at a time."""
    case = Case(kv_heads=1, group_size=8, entries=2**17, num_queries=16, width=128, wanted=("max", "lse"))
    kwargs = inputs(case, dtype, "cpu")
    assert extra_bytes(lambda: run(case, kwargs), torch.device("cpu")) <= 64 * MB


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    kwargs = inputs(CASES[name], dtype, "cuda")
    assert_right(run(CASES[name], kwargs), kwargs)


@contextmanager
def never_waiting():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["held per head", "pool avg", "known lse", "soft cap and sinks", "few queries, many keys"],
)
def test_nothing_waits_for_the_gpu(name):
    kwargs = inputs(CASES[name], torch.bfloat16, "cuda")
    run(CASES[name], kwargs)
    with never_waiting():
        run(CASES[name], kwargs)


@pytest.mark.gpu
def test_memory_is_linear_on_a_gpu():
    extra = []
    for entries in (2**14, 2**15):
        case = Case(kv_heads=8, group_size=4, entries=entries, width=128, wanted=("max",), group=True)
        kwargs = inputs(case, torch.bfloat16, "cuda")
        extra.append(extra_bytes(lambda case=case, kwargs=kwargs: run(case, kwargs), torch.device("cuda")))
    assert extra[1] <= 2.1 * extra[0] <= 64 * MB


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_what_hardly_scatters_keeps_its_digits(path, chunk):
    """Queries that are nearly the same: a sum of squares less what the mean explains would have none left."""
    case = Case(entries=200, num_queries=40, width=16, keys=(0, 160), wanted=("sum", "scatter"))
    kwargs = inputs(case, torch.float32, DEVICE)
    kwargs["queries_BQSD"] = kwargs["queries_BQSD"][:, :, :1] + 1e-3 * kwargs["queries_BQSD"]
    exact = dense(**moved(kwargs, "cpu"))["scatter"].to(DEVICE)
    with backend.using(path):
        found = attention_stats(**kwargs, chunk=chunk)
    assert float(((found.scatter - exact) / exact).abs().max()) < 3e-3


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_nothing_is_as_far_away_as_the_largest_distance(path):
    case = Case(entries=40, num_queries=30, width=16, wanted=("max", "sum"))
    with backend.using(path):
        far = attention_stats(**{**inputs(case, torch.float32, DEVICE), "distance": 2**31 - 1})
    assert not far.max.any() and not far.sum.any()


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("pool", [None, Pool("max", 3, 20)], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_no_probability_is_more_than_one(path, pool, given):
    """With logits so large that a log-sum-exp in float32 is short of digits after the point."""
    wanted = ("max", "sum", "lse")
    case = Case(entries=40, num_queries=20, width=16, wanted=wanted, pool=pool, padding=0)
    kwargs = {**inputs(case, torch.float32, DEVICE), "scaling": 3e4}
    with backend.using(path):
        found = attention_stats(**kwargs)
        if given:
            found = attention_stats(**kwargs, lse_BQS=found.lse * (1 - 1e-6))
        one = {"queries_BQSD": kwargs["queries_BQSD"][:, :, :1], "first_query": 20}
        first = attention_stats(**{**kwargs, "wanted": "sum", **one})
    assert found.lse.abs().max() > 1e4
    assert found.max.max() == 1
    assert first.sum.max() <= 1
    assert found.sum.max() <= 20
