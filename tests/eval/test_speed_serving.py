import gc
import json
import statistics
import time

import pytest
import torch

from retain.eval.speed import scoring as speed
from retain.eval.speed import serving as speed_serving
from retain.eval.speed import stages as speed_stages
from retain.eval.speed.cache_bytes import cache_bytes
from retain.eval.speed.serving import Bench, Setting, Side, main, measure, round_of, row_of
from retain.eval.speed.stages import EVICTION, SCORING, staged
from retain.eval.speed.table import serving, show_median, show_mib, show_share, show_spread, spread_and_all
from retain.gates.store import save_gates
from retain.hf.cache.eviction_request import EvictionRequest
from retain.hf.intercept.attach import attach, attachment_of
from retain.hf.model import gates as hf_gates
from retain.hf.model.decoder import fingerprint
from retain.policy import policies
from retain.process import memory as resident

TINY = {
    **{"tokens": 96, "policies": "snapkv;adakv,protection.recent=32", "keep_ratios": "0.5,0.75", "steps": 3},
    **{"batches": "1,2", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "intermediate": 48},
    **{"rounds": 2, "threads": 1},
}
ENTRY = 2 * 2 * 8 * 4  # layers x (key and value) x width x float32, of a KV head


def typed(**more):
    """A tiny setting as a command line."""
    return [
        part
        for name, value in {**TINY, **more}.items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


@pytest.fixture(scope="module", autouse=True)
def young():
    """The benchmark collects garbage before each life: let it look at no more than what is new."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "serving.json"
    assert main([*typed(), "--no-memory", "--output", str(output)]) == 0
    return json.loads(output.read_text()), output.with_suffix(".txt").read_text()


def test_one_run_tells_of_every_policy_and_the_full_caches(record):
    record, text = record
    assert serving(record) == text
    rows = record["rows"]
    sides = [(row["policy"], row["keep_ratio"]) for row in rows[:6]]
    own = ["snapkv", "adakv,protection.recent=32"]
    assert sides == [("plain", 1.0), ("full", 1.0), *((name, r) for r in (0.5, 0.75) for name in own)]
    assert [row["batch"] for row in rows] == [1] * 6 + [2] * 6
    for row in rows:
        tokens = row["batch"] * 2 * 96
        held, kept = row["cache_bytes"], tokens * row["keep_ratio"]
        assert held["full"] == tokens * ENTRY and held["held"] == kept * ENTRY
        assert held["held_at_end"] == (kept + row["batch"] * 2 * 3) * ENTRY
        assert held["allocated"] >= held["held"] and row["achieved_keep_ratio"] == row["keep_ratio"]
        assert row["peak_bytes"] == {"prefill": None, "decode": None} and row["failed"] == ""
        lives = 2 if row["kind"] == "policy" or row["policy"] == "full" else 2 * 5
        for what in ("ttft_ms", "token_ms", "tokens_per_s"):
            assert len(row[what]["all"]) == lives
        rate = [1e3 * row["batch"] / taken for taken in row["token_ms"]["all"]]
        assert row["tokens_per_s"]["median"] == pytest.approx(statistics.median(rate))
        for what in ("ttft_over_plain", "scoring_share", "eviction_share"):
            assert (row[what] is None) == (row["policy"] == "plain")
        assert (row["ttft_over_full"] is None) == (row["kind"] == "full")
        if row["kind"] == "policy":
            assert 0 < row["scoring_share"]["median"] < 1 and 0 < row["eviction_share"]["median"] < 1
        elif row["policy"] == "full":
            assert row["scoring_share"]["median"] == 0 < row["eviction_share"]["median"]
    assert record["model"] | {"parameters": 0, "weights_bytes": 0} == {
        **{"name": "random", "kind": "LlamaForCausalLM", "layers": 2, "evicting_layers": 2, "width": 32},
        **{"heads": 4, "kv_heads": 2, "parameters": 0, "weights_bytes": 0},
    }
    for part in ("python -m retain.eval.speed.serving", "batch 2", "peak: not measured", "50.0%", "75.0%"):
        assert part in text


def test_a_dense_cache_of_as_many_entries(tmp_path):
    output = tmp_path / "serving.json"
    own = {"policies": "dense;snapkv", "keep_ratios": "0.5", "batches": "2"}
    assert main([*typed(**own), "--no-memory", "--output", str(output)]) == 0
    plain, full, dense, snapkv = json.loads(output.read_text())["rows"]
    assert (dense["policy"], dense["kind"]) == ("dense", "full")
    assert dense["cache_bytes"]["held"] == snapkv["cache_bytes"]["held"] == 2 * 2 * 48 * ENTRY
    assert dense["cache_bytes"]["held_at_end"] == dense["cache_bytes"]["held"] + 2 * 2 * 3 * ENTRY
    ratios = [a / b for a, b in zip(snapkv["token_ms"]["all"], dense["token_ms"]["all"], strict=True)]
    assert snapkv["token_over_dense"]["all"] == ratios
    assert not any("token_over_dense" in row for row in (plain, full, dense))


def test_neighbours_alternate_and_sides_take_turns(monkeypatch):
    order = []

    def look(bench, side, batch):
        order.append(side.policy)
        assert (attachment_of(side.model) is not None) == (side.policy != "plain"), "the twin is not attached"
        return (2.0, 1.0) if side.policy == "plain" else (3.0, 4.0)

    monkeypatch.setattr(speed_serving, "live", look)
    bench = Bench.of(Setting(**{**TINY, "policies": "snapkv,knorm", "keep_ratios": "0.5", "batches": "1"}))
    with attach(bench.model), torch.no_grad():
        sides = bench.sides()
        for turn in range(-1, 2):
            round_of(bench, sides, 1, turn)
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert [sorted({*pair} - {"plain"})[0] for pair in pairs] == [
        *("knorm", "full", "snapkv"),
        *("full", "snapkv", "knorm"),
        *("snapkv", "knorm", "full"),
    ]
    firsts = {name: [p[0] == "plain" for p in pairs if name in p] for name in ("full", "snapkv", "knorm")}
    assert all(len(set(own)) == 2 for own in firsts.values()), "each is behind and before its neighbour"
    plain, full, snapkv, _ = sides
    assert len(plain.ttft_ms) == 6 and len(full.ttft_ms) == len(snapkv.ttft_ms) == 2
    assert snapkv.ttft_over_plain == [1.5, 1.5] and snapkv.token_over_plain == [4.0, 4.0]


def test_a_side_without_memory_is_said_and_the_others_go_on(monkeypatch):
    decode = Side.decode

    def small(self, cache, seen, ids_BS):
        if self.policy == "full" and ids_BS.shape[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(self, cache, seen, ids_BS)

    monkeypatch.setattr(Side, "decode", small)
    bench = Bench.of(Setting(**{**TINY, "policies": "knorm", "keep_ratios": "0.5"}))
    rows = measure(bench)
    failed = [(row["policy"], row["batch"]) for row in rows if row["failed"]]
    assert failed == [("full", 2)] and rows[-1]["ttft_over_full"] is None
    assert rows[-1]["ttft_over_plain"] is not None


def test_lives_beside_a_plain_cache_without_memory_are_kept(monkeypatch):
    decode = Side.decode

    def small(self, cache, seen, ids_BS):
        if self.policy == "plain":
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(self, cache, seen, ids_BS)

    monkeypatch.setattr(Side, "decode", small)
    bench = Bench.of(Setting(**{**TINY, "policies": "knorm", "keep_ratios": "0.5", "batches": "1"}))
    plain, full, knorm = measure(bench)
    assert plain["failed"] == "out of memory"
    for row in (full, knorm):
        assert len(row["ttft_ms"]["all"]) == 2 and row["ttft_over_plain"] is None
    assert knorm["ttft_over_full"] is not None


def test_a_prefill_that_cannot_be_clocked_leaves_out_its_share(monkeypatch):
    clock_stages, first = speed_serving.clock_stages, Side.first

    def clocked(bench, side, batch):
        def large(self, ids_BT):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            if side.policy == "knorm":
                patch.setattr(Side, "first", large)
            clock_stages(bench, side, batch)
        assert Side.first is first

    monkeypatch.setattr(speed_serving, "clock_stages", clocked)
    bench = Bench.of(Setting(**{**TINY, "policies": "knorm", "keep_ratios": "0.5", "batches": "1"}))
    _, full, knorm = measure(bench)
    assert full["scoring_share"] is not None and not knorm["failed"]
    assert knorm["scoring_share"] is None and knorm["ttft_over_plain"] is not None


def test_the_memory_of_a_life_is_watched_in_a_process_of_its_own(monkeypatch):
    """The process's part, run here; the one that starts it reads its last line."""
    monkeypatch.setattr(resident, "reset_peak", lambda: None)
    peaks = iter(range(1, 100))
    monkeypatch.setattr(resident, "held_now", lambda: 0)
    monkeypatch.setattr(resident, "held_at_most", lambda: next(peaks))
    setting = Setting(**{**TINY, "policies": "snapkv", "keep_ratios": "0.5"})
    found = speed_serving.watch(setting)
    assert [(one["policy"], one["batch"]) for one in found] == [
        (name, batch) for batch in (1, 2) for name in ("plain", "full", "snapkv")
    ]
    assert [(one["prefill"], one["decode"]) for one in found][:2] == [(1, 2), (3, 4)]

    def run(module, flags):
        assert module == "retain.eval.speed.serving" and flags == [
            "--watch",
            *(f"--{name.replace('_', '-')}={value}" for name, value in vars(setting).items()),
        ]
        return ["noise", json.dumps(found)]

    monkeypatch.setattr(resident, "in_a_process", run)
    record = speed_serving.benchmark(setting)
    assert record["peak_of"].startswith("process: resident set at most")
    assert [row["peak_bytes"]["prefill"] for row in record["rows"]] == [1, 3, 5, 7, 9, 11]


def test_by_default_every_preset_that_needs_nothing_made(monkeypatch):
    names = [entry.policy for entry in Setting().entries()]
    assert {"snapkv", "defensivekv", "lava", "random", "streaming_llm"} < set(names)
    assert not {"full", "gate", "fused", "duoattention"} & set(names)
    with_gates = [entry.policy for entry in Setting(gates="random").entries()]
    assert set(with_gates) - set(names) == {"gate", "fused"}
    assert {*with_gates, "full", "duoattention"} == {preset.name for preset in policies()}


def test_policies_with_gates_run_on_random_ones():
    bench = Bench.of(Setting(**{**TINY, "policies": "fused", "gates": "random", "batches": "1"}))
    with attach(bench.model), torch.no_grad():
        sides = bench.sides()
        bench.try_out(sides, 1)
    assert [side.achieved for side in sides] == [1.0, 1.0, 0.5, 0.75]


def test_gates_in_a_folder_are_loaded_once_and_not_in_every_life(tmp_path, monkeypatch):
    setting = Setting(**{**TINY, "policies": "gate", "gates": "random", "keep_ratios": "0.5"})
    drawn = Bench.of(setting)
    save_gates(drawn.gates, tmp_path, fingerprint=fingerprint(drawn.model))
    loads, load_gates = [], speed_serving.load_gates

    def counted(*given, **more):
        loads.append(given)
        return load_gates(*given, **more)

    monkeypatch.setattr(speed_serving, "load_gates", counted)
    monkeypatch.setattr(hf_gates, "load_gates", counted)
    bench = Bench.of(Setting(**{**vars(setting), "gates": str(tmp_path)}))
    rows = measure(bench)
    assert [given[0] for given in loads] == [str(tmp_path)]
    assert len(rows) == 2 * 3 and not any(row["failed"] for row in rows)


def test_the_reference_model_and_a_folder_are_models(tmp_path):
    bench = Bench.of(Setting(model="reference", tokens=64, batches="1"))
    assert type(bench.model).__name__ == "Qwen3ForCausalLM"
    assert int(bench.ids_BT.max()) < bench.model.config.vocab_size
    speed.build_model(Setting(**TINY).shape()).save_pretrained(tmp_path)
    own = Bench.of(Setting(**{**TINY, "model": str(tmp_path)}))
    assert own.model.config.hidden_size == 32 and not own.model.training


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"keep_ratios": "0.2,2"}, "keep_ratios are numbers above 0 and at most 1, separated by commas, got"),
        ({"keep_ratios": "a"}, "keep_ratios are numbers above 0"),
        ({"batches": "0"}, "batches are whole numbers of at least 1, separated by commas, got '0'"),
        ({"rounds": 1}, "rounds is a whole number of at least 2"),
        ({"warmup": 0}, "warmup is a whole number of at least 1"),
        ({"policies": "snapvk"}, "unknown policy 'snapvk': did you mean 'snapkv'"),
        ({"policies": "fused"}, "policy 'fused' needs gates: pass --gates"),
        ({"kv_heads": 3}, "heads 4 are not a multiple of kv_heads 3"),
        ({"keep_ratios": "0.2"}, "policy 'snapkv' at keep_ratio 0.2: .*protected"),
        ({"model": "/nowhere/at/all"}, "model '/nowhere/at/all' cannot be loaded"),
        ({"model": "reference", "tokens": 5000}, "5000 tokens and 3 steps are more than the 4096 positions"),
    ],
)
def test_errors_come_before_anything_is_timed(more, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(speed_serving, "live", None)
    assert main([*typed(**more), "--output", str(tmp_path / "serving.json")]) == 2
    with pytest.raises(ValueError, match=message):
        raise ValueError(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_it_is_reached_from_the_first_benchmark(monkeypatch):
    seen = []
    monkeypatch.setattr(speed_serving, "main", lambda arguments: seen.append(arguments) or 0)
    assert speed.main(["--what", "serving", "--tokens", "96", "--no-memory"]) == 0
    assert seen == [["--tokens", "96", "--no-memory"]]
    with pytest.raises(ValueError, match="has a setting of its own: call retain.eval.speed.serving"):
        speed.benchmark("serving", speed.Setting(), ["snapkv"])


def test_a_stage_is_what_it_takes_without_the_stages_inside(monkeypatch):
    class Work:
        def outer(self):
            time.sleep(0.02)
            self.inner()
            time.sleep(0.02)

        def inner(self):
            time.sleep(0.05)

    parts = ((Work, "outer", EVICTION), (Work, "inner", SCORING))
    monkeypatch.setattr(speed_stages, "PARTS", parts)
    before = {**vars(Work)}
    with staged("cpu") as seconds:
        Work().outer()
    assert 0.05 <= seconds[SCORING] < 0.065 + 0.05 and 0.04 <= seconds[EVICTION] < 0.05 + 0.05
    assert {**vars(Work)} == before


def test_stages_are_those_of_the_pipeline_and_put_back():
    for owner, name, _ in speed_stages.PARTS:
        assert name in vars(owner), f"{owner} has no {name} of its own: name where it is"
    score = EvictionRequest.score
    with pytest.raises(RuntimeError, match="stop"), staged("cpu"):
        assert EvictionRequest.score is not score
        raise RuntimeError("stop")
    assert EvictionRequest.score is score


def test_a_spread_is_numpys_percentiles():
    values = torch.rand(11, dtype=torch.float64).tolist()
    spread = spread_and_all(values)
    for percent in (5, 20, 80, 95):
        naive = float(torch.tensor(values, dtype=torch.float64).quantile(percent / 100))
        assert spread[f"p{percent}"] == pytest.approx(naive)
    assert spread["median"] == sorted(values)[5] and spread["all"] == values
    assert spread_and_all([1.0]) is None
    assert show_spread({"p20": 1.0, "median": 2.0, "p80": 3.0}, 1) == "2.0 (1.0..3.0)"
    assert (show_spread(None, 1), show_median(None), show_share(None), show_mib(None)) == ("-",) * 4
    assert (show_median({"median": 1.5}), show_share({"median": 0.5}), show_mib(2**20)) == (
        "1.500",
        "50.0%",
        "1.0",
    )


def test_ratios_to_the_full_cache_are_taken_within_rounds():
    model = speed.build_model(Setting(**TINY).shape())
    full, own = (Side(name, 1.0, model, list) for name in ("full", "own"))
    full.ttft_ms, own.ttft_ms = [1.0, 2.0, 10.0], [2.0, 2.0, 11.0]
    full.token_ms, own.token_ms = [4.0, 4.0, 4.0], [2.0, 1.0, 8.0]
    row = row_of(own, full, 1, Setting(**TINY))
    assert row["ttft_over_full"]["median"] == 1.1 and row["token_over_full"]["median"] == 0.5
    full.failed = "out of memory"
    assert row_of(own, full, 1, Setting(**TINY))["ttft_over_full"] is None


def test_bytes_of_a_foreign_cache_are_its_tensors():
    layer = type("Layer", (), {})()
    layer.keys, layer.values = torch.zeros(2, 3), torch.zeros(4)[:2]
    layer.states, layer.name = {0: torch.zeros(5)}, "x"
    other = type("Layer", (), {})()
    both = torch.zeros(20)  # one storage, which two views share
    other.keys, other.values = both[:3], both[10:13]
    cache = type("Foreign", (), {"layers": [layer, other]})()
    held = 4 * (6 + 2 + 5 + 3 + 3)
    assert cache_bytes(cache) == {"held": held, "allocated": 4 * (6 + 4 + 5 + 20), "full": held}
