import gc
import itertools
import json
import os
import statistics

import pytest
import torch

from retain.eval.speed import scoring as speed
from retain.eval.speed.scoring import (
    POLICIES,
    Setting,
    Timing,
    benchmark,
    build_model,
    describe_row,
    main,
    median_interval,
    parse_entry,
    table,
)
from retain.hf.intercept.attach import attachment_of
from retain.policy import policies

TINY = Setting(
    tokens=48, layers=2, width=32, heads=4, kv_heads=2, intermediate=48, threads=1, pairs=3, warmup=1
)
# 48 tokens at keep_ratio 0.5 leave 24 entries a head, of which a preset's recent 32 would be protected.
SNAPKV = "snapkv,scope=layer,protection.recent=4,observed_settings.window=4"


def typed(setting, *rest):
    """The setting as a command line."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in vars(setting).items()]
    return ["--what", "scoring", *itertools.chain(*pairs), *rest]


def test_a_policy_is_a_name_and_settings():
    entry = parse_entry("snapkv,scope=layer,protection.recent=8,protection.sinks=0,floor=null")
    assert entry.policy == "snapkv"
    assert entry.overrides == {"scope": "layer", "protection": {"recent": 8, "sinks": 0}, "floor": None}
    with pytest.raises(ValueError, match="'layer' is no setting; write NAME,key=value"):
        parse_entry("snapkv,layer")


def test_default_policies_are_presets():
    assert {parse_entry(typed).policy for typed in POLICIES} <= {preset.name for preset in policies()}


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9, 12])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    """Every one of the 2^n ways in which n values may fall below (0) or above (1) the median."""
    values = [10.0 + i for i in range(n)]
    low, high, covered = median_interval(values[::-1])
    first, last = values.index(low), values.index(high)
    assert first == n - 1 - last
    between = 0
    for sides in itertools.product((0, 1), repeat=n):
        below = sides.count(0)
        between += first < below <= last
    assert covered == between / 2**n
    narrower = sum(first + 1 < sides.count(0) <= last - 1 for sides in itertools.product((0, 1), repeat=n))
    assert narrower / 2**n < 0.95, "as narrow as the confidence allows"
    if n >= 6:
        assert covered >= 0.95


def test_a_row_is_the_median_of_ratios_and_not_the_ratio_of_medians():
    timing = Timing("x", (1.0, 2.0, 10.0), (2.0, 2.0, 11.0), 3, 4)
    row = describe_row(timing)
    assert timing.ratios == (2.0, 1.0, 1.1)
    assert row["ratio"] == 1.1 and row["plain_median_ms"] == 2.0 and row["policy_median_ms"] == 2.0
    assert row["interval"][:2] == (1.0, 2.0)


def test_pairs_are_interleaved_and_alternate(monkeypatch):
    """On a clock that counts calls, each pair's prefills are neighbours, and who comes first changes."""
    order = []
    cut, plain = speed.Cache.prefill, speed.DynamicCache
    monkeypatch.setattr(speed.Cache, "prefill", lambda *a, **k: order.append("policy") or cut(*a, **k))
    monkeypatch.setattr(speed, "DynamicCache", lambda **k: order.append("plain") or plain(**k))
    (timing,) = speed.measure_scoring(TINY, [parse_entry(SNAPKV)])
    assert order[0] == "policy"  # the one that counts bytes
    pairs = [tuple(order[i : i + 2]) for i in range(1, len(order), 2)]
    one, other = ("plain", "policy"), ("policy", "plain")
    assert pairs == [one, other, one, other]
    assert len(timing.ratios) == 3 and all(ratio > 0 for ratio in timing.ratios)


def test_the_plain_side_runs_on_a_model_that_is_not_attached(monkeypatch):
    """And on the same weights."""
    seen, models, base = [], [build_model(TINY)], speed.base_model

    def look(model):
        seen.append(model)
        assert attachment_of(models[0]) is not None and attachment_of(model) is None
        return base(model)

    monkeypatch.setattr(speed, "base_model", look)
    monkeypatch.setattr(speed, "build_model", lambda setting: models[0])
    speed.measure_scoring(TINY, [parse_entry(SNAPKV)])
    assert len(seen) == 4
    assert attachment_of(models[0]) is None, "let go in the end"
    for own, other in zip(seen[0].parameters(), models[0].parameters(), strict=True):
        assert own.data_ptr() == other.data_ptr()


def test_threads_and_garbage_collection_are_put_back(monkeypatch):
    threads = torch.get_num_threads()
    seen, cut = [], speed.Cache.prefill

    def look(*args, **kwargs):
        seen.append((torch.get_num_threads(), gc.isenabled()))
        return cut(*args, **kwargs)

    monkeypatch.setattr(speed.Cache, "prefill", look)
    speed.measure_scoring(Setting(**{**vars(TINY), "threads": threads + 1}), [parse_entry(SNAPKV)])
    assert set(seen) == {(threads + 1, False)}
    assert torch.get_num_threads() == threads and gc.isenabled()


def test_the_tool_prints_a_table_and_writes_every_time(tmp_path, capsys):
    output = tmp_path / "runs" / "scoring.json"
    assert (
        main(typed(TINY, "--keep-ratio", "0.5", "--policies", SNAPKV, "full", "--output", str(output))) == 0
    )
    printed = capsys.readouterr().out
    record = json.loads(output.read_text())
    text = output.with_suffix(".txt").read_text()
    assert printed.startswith(text) and table(record) == text
    for part in ("torch 2.", "commit", "cores", "1 threads", "python -m retain.eval.speed"):
        assert part in text
    cut, full = record["rows"]
    entry = 2 * 2 * 8 * 4  # layers x (key and value) x width x float32
    assert full["bytes_held"] == full["bytes_full"] == cut["bytes_full"] == 48 * 2 * entry
    assert cut["bytes_held"] == 24 * 2 * entry
    assert f"{cut['bytes_held']:,} / {cut['bytes_full']:,}" in text
    for row in record["rows"]:
        assert len(row["plain_ms"]) == len(row["policy_ms"]) == 3
        ratios = [a / b for a, b in zip(row["policy_ms"], row["plain_ms"], strict=True)]
        assert row["ratio"] == statistics.median(ratios)
    assert {**vars(TINY), "keep_ratio": 0.5} == record["setting"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "scorin"], "unknown benchmark 'scorin': did you mean 'scoring'"),
        (["--what", "scoring", "--policies", "snapvk"], "unknown policy 'snapvk': did you mean 'snapkv'"),
        (["--what", "scoring", "--policies", "snapkv,scop=layer"], "'scop'.*did you mean 'scope'"),
        (["--what", "scoring", "--policies", "fused"], "needs gates"),
        (["--what", "scoring", "--pairs", "0"], "pairs is a whole number of at least 1, got 0"),
        (["--what", "scoring", "--kv-heads", "3"], "heads 8 are not a multiple of kv_heads 3"),
        (["--what", "scoring", "--width", "20"], "width 20 is not 8 heads of an even width"),
        (["--what", "scoring", "--keep-ratio", "20"], "keep_ratio is kept / seen"),
        (["--what", "scoring", "--dtype", "int8"], "dtype is one of float32"),
        (["--what", "scoring", "--device", "tpu"], "device is cpu or cuda, got 'tpu'"),
        (["--what", "scoring", "--tokens", "40", "--policies", "snapkv"], "protected"),
    ],
)
def test_errors_come_before_work(arguments, message, capsys, tmp_path, monkeypatch):
    def refuse(**kwargs):
        raise AssertionError("work began")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(speed, "DynamicCache", refuse)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
    assert os.listdir(tmp_path) == []


def test_no_policy_is_an_error():
    with pytest.raises(ValueError, match="no policy to time"):
        benchmark("scoring", TINY, [])


def test_a_device_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device; take cpu"):
        Setting(device="cuda")
