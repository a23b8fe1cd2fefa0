"""The benchmarks of caches (scoring, serving, long): records, errors before work, and their parts."""

import itertools
import json
import statistics
import time
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from retain.eval.speed import caches as speed_caches
from retain.eval.speed import long as speed_long
from retain.eval.speed import scoring, serving
from retain.eval.speed.__main__ import BENCHMARKS, main
from retain.eval.speed.caches import Bench, TimedCache, cache_bytes, name_of, typed_policies, waits_of
from retain.eval.speed.serving import EVICTION, PARTS, SCORING
from retain.eval.speed.stages import staged
from retain.gates.artifact import save_gates
from retain.hf.cache.cache import Cache
from retain.hf.cache.eviction_request import EvictionRequest
from retain.hf.intercept.attach import attach, attachment_of
from retain.hf.model import gates as hf_gates
from retain.hf.model.identity import fingerprint
from retain.hf.model.random_llama import random_llama
from retain.policy import policies
from retain.process import memory as resident

SHAPE = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "threads": 1}
ENTRY = 2 * 2 * 8 * 4  # layers x (key and value) x width x float32, of a KV head
# 48 tokens at keep_ratio 0.5 leave 24 entries a head, of which a preset's recent 32 would be protected.
SNAPKV = "snapkv,scope=layer,protection.recent=4,observed_settings.window=4"
TINY = {
    "scoring": {
        **SHAPE,
        "tokens": 48,
        "pairs": 3,
        "warmup": 1,
        "keep_ratio": 0.5,
        "policies": (SNAPKV, "full"),
    },
    "serving": {
        **{**SHAPE, "tokens": 96, "policies": "snapkv;adakv,protection.recent=32;dense", "steps": 3},
        **{"keep_ratios": "0.5,0.75", "batches": "1,2", "rounds": 2, "memory": False},
    },
    "long": {
        **{**SHAPE, "tokens": "200,260", "policies": "fused,defensivekv,lava", "steps": 3, "batch": 2},
        **{"keep_ratio": 0.5, "rounds": 2, "warmup": 0, "dtype": "float32", "device": "cpu"},
    },
}


def typed(what, **more):
    """A tiny setting as a command line."""
    words = ["--what", what]
    for name, value in {**TINY[what], **more}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *(value if isinstance(value, tuple) else (str(value),))]
    return words


def settings(what, **more):
    (own,) = (one for one in BENCHMARKS if one.what == what)
    return own.settings(**{**TINY[what], **more})


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """The record and the table of each, as the command writes them."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for what in TINY:
        assert main([*typed(what), "--output", str(folder / f"{what}.json")]) == 0
        text = (folder / f"{what}.txt").read_text()
        found[what] = json.loads((folder / f"{what}.json").read_text()), text
        assert f"python -m retain.eval.speed --what {what}" in text
    return found


def test_scoring_has_a_ratio_and_its_interval_for_each_policy(records):
    record, text = records["scoring"]
    plain, cut, full = record["rows"]
    assert plain["policy"] == "plain" and full["cache_bytes"]["held"] == full["cache_bytes"]["full"]
    assert cut["cache_bytes"]["held"] == 24 * 2 * ENTRY and cut["cache_bytes"]["full"] == 48 * 2 * ENTRY
    for row in (cut, full):
        ratio = row["prefill_over_plain"]
        assert len(ratio["all"]) == len(row["prefill_ms"]["all"]) == 3
        assert ratio["median"] == statistics.median(ratio["all"])
        assert row["interval"][:2] == [min(ratio["all"]), max(ratio["all"])] and row["interval"][2] == 0.75
    assert len(plain["prefill_ms"]["all"]) == 6 and f"{24 * 2 * ENTRY:,}" in text and "(75%)" in text


@pytest.mark.parametrize("n", [1, 5, 6, 9, 12])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    """Every one of the 2^n ways in which n values may fall below (0) or above (1) the median."""
    values = [10.0 + i for i in range(n)]
    low, high, covered = scoring.median_interval(values[::-1])
    first, last = values.index(low), values.index(high)
    assert first == n - 1 - last and (n < 6 or covered >= 0.95)
    below = [sides.count(0) for sides in itertools.product((0, 1), repeat=n)]
    assert covered == sum(first < count <= last for count in below) / 2**n
    assert sum(first + 1 < count <= last - 1 for count in below) / 2**n < 0.95, "as narrow as it can be"


def test_serving_tells_of_every_policy_and_the_full_caches(records):
    record, text = records["serving"]
    rows, own = record["rows"], ["snapkv", "adakv,protection.recent=32", "dense"]
    sides = [(row["policy"], row["keep_ratio"]) for row in rows[:8]]
    assert sides == [("plain", 1.0), ("full", 1.0), *((name, r) for r in (0.5, 0.75) for name in own)]
    assert [row["batch"] for row in rows] == [1] * 8 + [2] * 8
    for row in rows:
        name, held, policy = row["policy"], row["cache_bytes"], row["kind"] == "policy"
        full, tokens = name in ("plain", "full"), row["batch"] * 2 * 96
        assert held["held"] == tokens * row["keep_ratio"] * ENTRY <= held["allocated"]
        assert held["held_at_end"] == held["held"] + row["batch"] * 2 * 3 * ENTRY
        if name != "dense":
            assert held["full"] == tokens * ENTRY and row["achieved_keep_ratio"] == row["keep_ratio"]
        for what in ("ttft_ms", "token_ms", "tokens_per_s"):
            assert len(row[what]["all"]) == (2 * 7 if name == "plain" else 2)
        rate = [1e3 * row["batch"] / taken for taken in row["token_ms"]["all"]]
        assert row["tokens_per_s"]["median"] == pytest.approx(statistics.median(rate))
        for what in ("ttft_over_plain", "scoring_share", "eviction_share"):
            assert (what in row) == (name != "plain")
        assert ("ttft_over_full" in row) == (name != "full") and row["peak_bytes"]["prefill"] is None
        assert ("token_over_dense" in row) == policy
        if policy:
            assert 0 < row["scoring_share"]["median"] < 1 and 0 < row["eviction_share"]["median"] < 1
        elif name == "full":
            assert row["scoring_share"]["median"] == 0 < row["eviction_share"]["median"]
        assert full or 0 < row["held_of_full"] <= 1
    snapkv, _, dense = rows[2:5]
    ratios = [a / b for a, b in zip(snapkv["token_ms"]["all"], dense["token_ms"]["all"], strict=True)]
    assert snapkv["token_over_dense"]["all"] == ratios
    model = {"name": "random", "kind": "LlamaForCausalLM", "layers": 2, "evicting_layers": 2, "width": 32}
    assert record["model"].items() >= (model | {"heads": 4, "kv_heads": 2}).items()
    for part in ("batch 2", "peak: not measured", "50.0%", "75.0%"):
        assert part in text


def test_long_tells_of_every_cache_at_every_length(records):
    record, text = records["long"]
    assert record["check"]["error"] <= record["check"]["allowed"] == 1e-4
    names = ["plain", "full", "fused", "defensivekv", "lava"]
    assert [(r["tokens"], r["policy"]) for r in record["rows"]] == [*itertools.product((200, 260), names)]
    for row in record["rows"]:
        full, new = row["kind"] == "full", speed_long.FIRST + 3
        kept = row["tokens"] if full else row["tokens"] // 2
        held = row["cache_bytes"]
        assert held["held_at_end"] == 2 * 2 * (kept + new) * ENTRY <= held["allocated_at_end"]
        for what in ("prefill", "token"):
            assert len(row[f"{what}_ms"]["all"]) == 2
            for other in ("plain", "full"):
                assert (f"{what}_over_{other}" in row) == (row["policy"] != other)
        assert row["peak_bytes"]["prefill"] is row["waits_a_token"] is None
    for part in ("prefill of 200", "decoding behind 260", "gates: random, linear", "paths: "):
        assert part in text


@pytest.mark.parametrize(
    ("what", "more", "message"),
    [
        ("scoring", {"policies": ("snapvk",)}, "unknown policy 'snapvk': did you mean 'snapkv'"),
        ("scoring", {"policies": ("snapkv,scop=layer",)}, "'scop'.*did you mean 'scope'"),
        ("scoring", {"policies": ("snapkv,layer",)}, "override 'layer': expected key=value"),
        ("scoring", {"policies": ("fused",)}, "needs gates"),
        ("scoring", {"policies": ("snapkv",), "tokens": 40}, "'snapkv' at keep_ratio 0.5: .*protected"),
        ("scoring", {"width": 20}, "width 20 is not 4 heads of an even width"),
        ("serving", {"kv_heads": 3}, "heads 4 are not a multiple of kv_heads 3"),
        ("serving", {"keep_ratios": "0.2,2"}, "keep_ratios are numbers above 0 and at most 1, separated by"),
        ("serving", {"batches": "0"}, "batches are whole numbers of at least 1, separated by .*, got '0'"),
        ("serving", {"warmup": 0, "rounds": 1}, "rounds .* at least 2, got 1; warmup .* at least 1, got 0"),
        ("serving", {"keep_ratios": "0.2"}, "policy 'snapkv' at keep_ratio 0.2: .*protected"),
        ("serving", {"model": "/nowhere/at/all"}, "model='/nowhere/at/all' cannot be loaded"),
        ("serving", {"model": "reference", "tokens": 5000}, "5000 tokens and 3 steps are more than the 4096"),
        ("long", {"tokens": "32K"}, "tokens are whole numbers of at least 128, separated by .*, got '32K'"),
        ("long", {"policies": "snapkv,scope"}, "unknown policy 'scope'"),
        ("long", {"device": "cuda"}, "torch sees no CUDA device; take cpu"),
    ],
)
def test_errors_come_before_anything_is_timed(what, more, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for module in (scoring, serving, speed_long):
        monkeypatch.setattr(module, "interleave", None)
    assert main(typed(what, **more)) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_policies_are_names_and_settings():
    assert typed_policies("snapkv,scope=layer;lava;lava") == ["snapkv,scope=layer", "lava"]
    assert typed_policies("snapkv,lava,snapkv") == ["snapkv", "lava"]
    known = {preset.name for preset in policies() if preset.regime != "select"}
    assert {*map(name_of, scoring.POLICIES)} <= known
    names = {*serving.ServingSettings().entries()}
    tables = {"duoattention", "headkv", "compresskv"}
    assert not {"full", "gate", "fused", *tables} & names
    with_gates = {*serving.ServingSettings(gates="random").entries()}
    assert with_gates - names == {"gate", "fused", "merge"} and {*with_gates, "full", *tables} == known


def bench_of(**more):
    own = settings("serving", **{"keep_ratios": "0.5", "batches": "1", **more})
    return own, serving.bench_of(own)


def test_settings_of_a_policy_reach_its_cache():
    _, bench = bench_of()
    one = bench.cut("snapkv,scope=layer,protection.recent=8,floor=null", 0.5, bench.workload(40))
    policy = one.empty().state.bound_policy.request.policy
    assert (policy.scope, policy.protection.recent, policy.floor) == ("layer", 8, None)


def test_both_models_have_the_same_weights_and_only_ours_is_attached():
    own, bench = bench_of()
    with attach(bench.model), torch.no_grad():
        plain, *others = serving.caches_of(own, bench, 1)
        for one in (plain, *others):
            assert (attachment_of(one.model) is None) == (one.name in ("plain", "dense"))
            assert one.beside is (None if one is plain else plain)
    for one, other in zip(bench.twin.parameters(), bench.model.parameters(), strict=True):
        assert one.data_ptr() == other.data_ptr()


KNORM = settings("serving", policies="knorm", keep_ratios="0.5", batches="1")


@pytest.mark.parametrize("lost", ["plain", "full"])
def test_a_cache_without_memory_is_said_and_the_others_go_on(lost, monkeypatch):
    decode = TimedCache.decode

    def small(self, cache, seen, ids_BS):
        if self.name == lost:
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(self, cache, seen, ids_BS)

    monkeypatch.setattr(TimedCache, "decode", small)
    rows = serving.measure(KNORM)["rows"]
    failed = {row["policy"]: row["failed"] for row in rows}
    assert failed == dict.fromkeys(("plain", "full", "knorm"), "") | {lost: "out of memory"}
    knorm = rows[-1]
    assert len(knorm["ttft_ms"]["all"]) == 2 and f"ttft_over_{lost}" not in knorm
    assert ("ttft_over_plain" in knorm) == (lost == "full")


def test_a_prefill_that_cannot_be_clocked_leaves_out_its_share(monkeypatch):
    def shares(one):
        if one.name == "knorm":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {SCORING: 0.5, EVICTION: 0.25}

    monkeypatch.setattr(serving, "stage_shares", shares)
    _, full, knorm = serving.measure(KNORM)["rows"]
    assert full["scoring_share"]["median"] == 0.5 and full["eviction_share"]["all"] == [0.25] * 2
    assert knorm["scoring_share"] is None and not knorm["failed"] and knorm["ttft_over_plain"] is not None


def test_memory_is_watched_in_a_process_of_its_own(monkeypatch):
    """The process's part, run here."""
    peaks = itertools.count(1)
    monkeypatch.setattr(resident, "reset_peak", lambda: None)
    monkeypatch.setattr(resident, "held_now", lambda: 0)
    monkeypatch.setattr(resident, "held_at_most", lambda: next(peaks))
    own = settings("serving", policies="snapkv", keep_ratios="0.5", batches="1,2", memory=True)
    found = serving.watch(own)
    # Each is asked behind its prompt, before it decodes, and in the end.
    assert [(one["policy"], one["batch"], one["prefill"], one["decode"]) for one in found] == [
        (name, batch, 3 * place + 1, 3 * place + 3)
        for place, (batch, name) in enumerate(itertools.product((1, 2), ("plain", "full", "snapkv")))
    ]
    monkeypatch.setattr(serving.Benchmark, "watched", lambda self, asked: [found] if asked == [own] else None)
    record = serving.measure(own)
    assert record["peak_of"].startswith("process: resident set at most")
    assert [row["peak_bytes"]["prefill"] for row in record["rows"]] == [1, 4, 7, 10, 13, 16]


def test_gates_are_loaded_once_and_not_in_every_life(tmp_path, monkeypatch):
    _, drawn = bench_of(policies="gate;fused", gates="random")
    save_gates(drawn.gates, tmp_path, fingerprint=fingerprint(drawn.model))
    counted = Mock(side_effect=speed_caches.load_gates)
    monkeypatch.setattr(speed_caches, "load_gates", counted)
    monkeypatch.setattr(hf_gates, "load_gates", counted)
    own = settings("serving", policies="gate;fused", keep_ratios="0.5", gates=str(tmp_path))
    rows = serving.measure(own)["rows"]
    assert [call.args[0] for call in counted.mock_calls] == [str(tmp_path)]
    assert len(rows) == 2 * 4 and not any(row["failed"] for row in rows)
    assert {row["achieved_keep_ratio"] for row in rows if row["kind"] == "policy"} == {0.5}


def test_the_reference_model_and_a_folder_are_models(tmp_path):
    _, bench = bench_of(model="reference", tokens=64)
    assert type(bench.model).__name__ == "Qwen3ForCausalLM"
    assert int(bench.ids_BT.max()) < bench.model.config.vocab_size
    random_llama(settings("serving"), 99).save_pretrained(tmp_path)
    _, own = bench_of(model=str(tmp_path))
    assert own.model.config.hidden_size == 32 and not own.model.training


def test_nothing_is_timed_if_our_cache_is_wrong(monkeypatch, tmp_path, capsys):
    logits = TimedCache.logits

    def off(self, cache, *args):
        return (one * (1.01 if isinstance(cache, Cache) else 1) for one in logits(self, cache, *args))

    monkeypatch.setattr(TimedCache, "logits", off)
    monkeypatch.setattr(speed_long, "interleave", None)
    assert main([*typed("long"), "--output", str(tmp_path / "long.json")]) == 2
    shown = capsys.readouterr()
    assert "keeps everything gives other logits than transformers' own: error" in shown.err and not shown.out
    assert not list(tmp_path.iterdir())


def test_attention_of_a_package_that_is_installed_stands_beside(monkeypatch):
    """On a GPU; here the device is only said to be one when caches are made."""
    own = settings("long", policies="snapkv")
    bench = Bench(random_llama(own, 200), "", 1, 140, "cpu", 0)
    names = {"json": "eager", "no_such_package": "sdpa", "math": "flash_attention_2"}
    monkeypatch.setattr(speed_long, "ATTENTIONS", names)
    with attach(bench.model):
        object.__setattr__(own, "device", "cuda")
        caches = speed_long.caches_of(own, bench, bench.workload(130))
    assert [one.name for one in caches[:3]] == ["plain", "full", "snapkv"]
    eager, flash = caches[3:]
    assert eager.name == "plain, eager" and eager.model.config._attn_implementation == "eager"
    assert bench.twin.config._attn_implementation == "sdpa" and flash.failed and not eager.failed
    assert next(eager.model.parameters()) is next(bench.twin.parameters())


def test_waits_are_counted_where_there_is_a_device(monkeypatch):
    modes: list[str] = []
    assert waits_of(lambda: modes.append("ran"), on_gpu=False) is None and modes.pop() == "ran"
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def run():
        assert modes == ["warn"]
        for text in (*["called a synchronizing CUDA operation"] * 3, "something else"):
            warnings.warn(text, stacklevel=1)

    assert waits_of(run, on_gpu=True) == 3 and modes == ["warn", "default"]


def test_a_stage_is_what_it_takes_without_the_stages_inside():
    class Work:
        def outer(self):
            time.sleep(0.04)
            self.inner()

        def inner(self):
            time.sleep(0.05)

    before = {**vars(Work)}
    with staged([(Work, "outer", EVICTION), (Work, "inner", SCORING)]) as ms:
        Work().outer()
    assert 50 <= ms[SCORING] < 115 and 40 <= ms[EVICTION] < 100 and {**vars(Work)} == before


def test_stages_are_those_of_the_pipeline_and_put_back():
    for owner, name, _ in PARTS:
        assert name in vars(owner), f"{owner} has no {name} of its own: name where it is"
    score = EvictionRequest.score
    with pytest.raises(RuntimeError, match="stop"), staged(PARTS):
        assert EvictionRequest.score is not score
        raise RuntimeError("stop")
    assert EvictionRequest.score is score


def test_bytes_of_a_foreign_cache_are_its_tensors():
    both = torch.zeros(20)  # one storage, which two views share
    states = {0: torch.zeros(5)}
    layer = SimpleNamespace(keys=torch.zeros(2, 3), values=torch.zeros(4)[:2], states=states, name="x")
    cache = SimpleNamespace(layers=[layer, SimpleNamespace(keys=both[:3], values=both[10:13])])
    held = 4 * (6 + 2 + 5 + 3 + 3)
    assert cache_bytes(cache) == {"held": held, "allocated": 4 * (6 + 4 + 5 + 20), "full": held}
