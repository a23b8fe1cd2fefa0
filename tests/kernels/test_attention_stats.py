"""attention_stats: the reference and the kernels against a dense matrix in float64, and refusals."""

import math
from dataclasses import replace

import pytest
import torch

from retain.kernels import backend
from retain.kernels.attention_stats import Pool, attention_stats, cases, reference
from retain.kernels.attention_stats.cases import ALL, CASES, Case, inputs, run
from retain.kernels.measure import check
from tests.close import assert_close
from tests.kernels.device import DEVICE, never_waiting
from tests.memory import Watch

MB = 10**6
# An access is right if it would be one at a threshold that is this much lower, or higher.
ROUNDING = 1e-4


def dense(
    queries_BQSD, keys_BHTD, *, scaling, wanted, entries=None, distance=0,
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
    before = (before if pool is not None else probs)[..., :entries]
    probs, sees = probs[..., :entries], (sees & (query - entry >= distance))[..., :entries]
    found = {
        "max": probs.amax(2),
        "sum": probs.sum(2),
        "scatter": (probs - probs.mean(2, keepdim=True)).square().sum(2),
        "plain": before.sum(2),
        "entropy": -(probs * (probs + 1e-10).log()).sum(2),
        "lse": total.log(),
    }
    if least_BQS is not None:
        found["last"] = torch.where(sees & (probs >= least_BQS[..., None]), query, -1).amax(2)
    if group:
        for name in {*found} - {"lse"}:
            each = found[name].unflatten(1, (H, G))
            found[name] = each.amax(2) if name in ("max", "last") else each.sum(2)
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
        actual = found[name].cpu()
        if name == "last":
            # A probability at the very threshold may count as either.
            low, high = (
                dense(**{**kwargs, "least_BQS": kwargs["least_BQS"].double() * factor})["last"]
                for factor in (1 + ROUNDING, 1 - ROUNDING)
            )
            assert actual.dtype == torch.int64 and bool(((low <= actual) & (actual <= high)).all())
            continue
        # The entropy of a certainty is nothing, but its rounding is that of the probability, 1.
        least = exact["sum"] if name == "entropy" else 0.0
        kind = torch.promote_types(kwargs["keys_BHTD"].dtype, torch.float32)
        assert actual.dtype == kind, name
        assert_close(actual + least, exact[name] + least, dtype=kind, ops=ops)
    assert {*found} == {*kwargs["wanted"]}


def moved(kwargs, device):
    """The same arguments elsewhere: the oracle reckons on the CPU."""
    return {name: one.to(device) if torch.is_tensor(one) else one for name, one in kwargs.items()}


def by_kernels(kwargs):
    with backend.using("triton"):
        return attention_stats(**kwargs)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_reference_is_the_formula(name, dtype, few, monkeypatch):
    """And the benchmark's check agrees; also if a block has few queries."""
    if few:
        small_blocks(monkeypatch)
    assert check(cases, CASES[name], dtype, "cpu") is None
    kwargs = inputs(CASES[name], dtype, "cpu")
    assert_right(attention_stats(**kwargs), kwargs)


def small_blocks(monkeypatch):
    """Blocks of a few queries of one head."""
    for name, size in (("_BLOCK", 1200), ("_LARGEST_BLOCK", 1200), ("_KEY_TILE", 600)):
        monkeypatch.setattr(reference, name, size)


@pytest.mark.parametrize("name", CASES)
def test_log_weights_are_added_to_logits(name):
    kwargs = inputs(CASES[name], torch.float64, DEVICE)
    kwargs = {key: actual for key, actual in kwargs.items() if key != "lse_BQS"}
    (B, H, T, _), draw = kwargs["keys_BHTD"].shape, torch.Generator(device=DEVICE).manual_seed(3)
    plain = attention_stats(**kwargs)
    weights = torch.randint(1, 30, (B, H, T), generator=draw, device=DEVICE).float().log()
    found = attention_stats(**kwargs, log_weight_BHT=weights)
    assert_right(found, {**kwargs, "log_weight_BHT": weights})
    assert any(not torch.equal(found[actual], plain[actual]) for actual in kwargs["wanted"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_the_formula(name, dtype):
    kwargs = inputs(CASES[name], dtype, DEVICE, seed=1)
    assert_right(by_kernels(kwargs), kwargs)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_zero_is_enough_of_what_is_seen_and_of_nothing_else(path):
    kwargs = inputs(Case(batch=2, entries=40, padding=7, held=0.6, width=16), torch.float32, DEVICE)
    kwargs["least_BQS"] = torch.zeros_like(kwargs["least_BQS"])
    with backend.using(path):
        assert_right(attention_stats(**kwargs), kwargs)


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"given_lse": True, "wanted": ("max", "sum", "scatter")},
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
        assert torch.equal(before[name], after[name]), name


def test_no_gradient_flows():
    kwargs = inputs(CASES["plain"], torch.float32, DEVICE)
    kwargs["queries_BQSD"].requires_grad_()
    found = run(CASES["plain"], kwargs)
    assert not any(found[name].requires_grad for name in ALL)


@pytest.mark.parametrize(
    ("width", "weighted", "why"), [(257, False, "width of 257"), (16, True, "log weights")]
)
def test_what_the_kernels_leave_to_the_reference(width, weighted, why):
    queries, keys = (torch.randn(1, 2, 4, width, device=DEVICE) for _ in range(2))
    kwargs = {"scaling": 0.1, "wanted": ("sum",), "log_weight_BHT": keys[..., 0] if weighted else None}
    assert_right(
        attention_stats(queries, keys, **kwargs), {"queries_BQSD": queries, "keys_BHTD": keys, **kwargs}
    )
    with backend.using("triton"), pytest.raises(ValueError, match=why):
        attention_stats(queries, keys, **kwargs)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", ["plain", "held per head", "G = 8, D = 33", "pool max"])
def test_heads_are_spread_over_threads(name, number, monkeypatch):
    """If there are enough of them; a thread computes alone, and the caller keeps its number."""
    kwargs, workers, plan = inputs(CASES[name], torch.float32, "cpu"), [], reference._Walk._plan
    monkeypatch.setattr(reference._Walk, "_plan", lambda walk: (plan(walk), workers.append(walk.workers)))
    torch.set_num_threads(number)
    with torch.inference_mode():
        found = [attention_stats(**kwargs) for _ in range(3)]
    pairs = min(number, CASES[name].batch * CASES[name].kv_heads)
    assert workers == [pairs if 2 * pairs > number else 1] * 3
    assert torch.get_num_threads() == number
    for stats in found:
        assert_right(stats, kwargs)
    assert all(torch.equal(found[1][each], found[2][each]) for each in kwargs["wanted"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_holds_little_at_any_length(dtype):
    """128K entries, whose keys alone are 67 MB a head in float32: also they are made a tile at a time."""
    case = Case(kv_heads=1, group_size=8, entries=2**17, num_queries=16, width=128, wanted=("max", "lse"))
    kwargs = inputs(case, dtype, "cpu")
    torch.set_num_threads(1)  # what other threads make is not watched
    with Watch() as watch:
        run(case, kwargs)
    assert watch.peak <= 64 * MB


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", backend.DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    kwargs = inputs(CASES[name], dtype, "cuda")
    assert_right(run(CASES[name], kwargs), kwargs)


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
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(case, kwargs)
        extra.append(torch.cuda.max_memory_allocated() - before)
    assert extra[1] <= 2.1 * extra[0] <= 64 * MB


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("few", [False, True])
def test_what_hardly_scatters_keeps_its_digits(path, few, monkeypatch):
    """Queries that are nearly the same: a sum of squares less what the mean explains would have none left."""
    case = Case(entries=200, num_queries=40, width=16, asked=160, wanted=("sum", "scatter"))
    if few:
        small_blocks(monkeypatch)
    kwargs = inputs(case, torch.float32, DEVICE)
    kwargs["queries_BQSD"] = kwargs["queries_BQSD"][:, :, :1] + 1e-3 * kwargs["queries_BQSD"]
    exact = dense(**moved(kwargs, "cpu"))["scatter"].to(DEVICE)
    with backend.using(path):
        found = attention_stats(**kwargs)
    assert float(((found["scatter"] - exact) / exact).abs().max()) < 3e-3


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
            found |= attention_stats(
                **{**kwargs, "wanted": ("max", "sum")}, lse_BQS=found["lse"] * (1 - 1e-6)
            )
        one = {"queries_BQSD": kwargs["queries_BQSD"][:, :, -1:], "wanted": ["sum"]}
        last = attention_stats(**{**kwargs, **one})
    assert found["lse"].abs().max() > 1e4
    assert found["max"].max() == 1
    assert last["sum"].max() <= 1
    assert found["sum"].max() <= 20
