"""The benchmarks of decoding over ragged rows, and of evicting while decoding."""

import json

import pytest
import torch

import retain
from retain.cache.store import RaggedStore
from retain.eval.speed import decode, eviction
from retain.eval.speed.__main__ import main
from retain.eval.speed.decode import DecodeSettings
from retain.eval.speed.eviction import SINKS, EvictionSettings, columns_held, extend_, model_of, rows_held
from retain.hf.intercept.attach import attach, attachment_of
from retain.presets import load_policy
from tests.refused import refused

DECODE = (
    "--what decode --batch 1 --heads 4 --kv-heads 2 --width 8 --seen 400 --threads 1 --evicted 5 --layers 2"
)
SHAPE = {"batch": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "width": 8, "threads": 1}
TINY = EvictionSettings(**SHAPE, context=300, tokens_per_head=120, every=8, rounds=2, policies="adakv")
EVICTION = ["--what", "eviction"] + [
    f"--{name.replace('_', '-')}={value}" for name, value in vars(TINY).items()
]


@pytest.mark.parametrize("changes", [{}, {"spread": 1.0}, {"seen": 1000, "batch": 1}])
def test_rows_are_as_unequal_as_asked(changes):
    own = DecodeSettings(**changes)
    lengths = own.lengths()
    assert len(lengths) == own.batch * own.kv_heads and sum(lengths) == own.held * len(lengths)
    assert max(lengths) / min(lengths) == pytest.approx(own.spread, rel=0.02)


def test_a_record_of_decoding_answers_the_five_questions(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode, "SHORT", 20)
    monkeypatch.setattr(decode, "LONG", 70)
    output = tmp_path / "decode.json"
    assert main([*DECODE.split(), "--rounds", "2", "--output", str(output)]) == 0
    record, shown = json.loads(output.read_text()), capsys.readouterr().out
    ratios, times = record["ratios"], record["times_ms"]
    assert [name[0] for name in ratios] == list("abccdde")
    for name, row in ratios.items():
        assert (row["kept"] is None) == (name[0] in "cd")
        if name[0] in "abc":
            above, below = (times[row[side]]["all"] for side in ("of", "over"))
            assert row["all"] == [up / down for up, down in zip(above, below, strict=True)]
    whole, share = (row["median"] for name, row in ratios.items() if name[0] == "d")
    assert share == whole / 5 and all(len(own["all"]) == 2 for own in times.values())
    assert record["bytes_held"] == 2 * 80 * 2 * 8 * 4
    assert "d: compaction over attention" in shown and "kept" in shown.lower() and "--seen 400" in shown


def test_a_record_of_evicting_has_both_readings_of_a_step(tmp_path, capsys):
    output, policies = tmp_path / "eviction.json", "snapkv,adakv,h2o"
    assert main([*EVICTION, "--periods", "2", "--policies", policies, "--output", str(output)]) == 0
    record, shown = json.loads(output.read_text()), capsys.readouterr().out
    assert list(record["policies"]) == policies.split(",")
    for name, row in record["policies"].items():
        assert row["check"]["error"] <= row["check"]["allowed"]
        held, times = row["held"], row["ms_a_step"]
        assert held["mean"] == 120 and (held["min"] < 120 < held["max"]) == (row["scope"] != "head")
        assert 120 + 8 < row["columns"] <= TINY.context + 8
        assert {len(taken["all"]) for taken in times.values()} == {TINY.rounds}
        pairs = zip(times["eviction"]["all"], times["attention"]["all"], strict=True)
        assert row["ratios"]["attention alone"]["all"] == [1 + up / down for up, down in pairs]
        assert 0 < times["eviction"]["median"] < times["evicting"]["median"]
        assert f"{name}, of the whole step" in shown and f"{row['columns']:,}" in shown


@pytest.mark.parametrize(("scope", "spread"), [("head", 1.0), ("layer", 4.0)])
def test_heads_hold_tokens_of_their_own(scope, spread):
    own = EvictionSettings()
    for mask_BHT in rows_held(own, scope):
        lengths_BH = mask_BHT.sum(-1)
        assert (lengths_BH.sum(-1) == 8 * 819).all()
        assert int(lengths_BH.max()) / int(lengths_BH.min()) == pytest.approx(spread, rel=0.02)
        assert mask_BHT[..., :SINKS].all() and mask_BHT[..., -own.read :].all()
        # Independent choices of a fifth: eight heads together hold most of what was seen.
        assert 0.7 < mask_BHT.any(1).float().mean() < 0.9


def test_a_cache_is_extended_to_what_it_would_hold():
    masks, model = rows_held(TINY, "layer"), model_of(TINY)
    with attach(model):
        cache = retain.Cache(model, "h2o", tokens_per_head=120, regime="prefill+decode", every=8)
        ids = torch.randint(128, (2, TINY.read))
        cache.prefill(ids)
        before = [layer.store.fork() for layer in cache.state.ragged]
        extend_(cache, TINY.context, masks, torch.Generator().manual_seed(0))
    assert cache.num_seen == TINY.context and cache.report().total.entries_held == 2 * 2 * 2 * 120
    assert torch.equal(cache.state.history.token_ids_BT[:, -TINY.read :], ids)
    assert columns_held(cache) == max(int(mask_BHT.any(1).sum(-1).max()) for mask_BHT in masks)
    for layer, mask_BHT, old in zip(cache.state.ragged, masks, before, strict=True):
        assert {"mass", "last_access"} <= set(layer.store.beside) == set(old.beside)
        for b, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
            keys, values, positions = layer.store.row(b, h)
            assert positions.tolist() == mask_BHT[b, h].nonzero().flatten().tolist()
            assert torch.equal(keys[-TINY.read :], old.row(b, h)[0]), "those that were read are as they were"
            assert torch.equal(values[-TINY.read :], old.row(b, h)[1])
            assert keys.unique(dim=0).shape == keys.shape, "and no two of the others are alike"


def scaled(monkeypatch, module, factor):
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda *args, **settings: attend(*args, **settings) * factor)


def shifted(monkeypatch):
    compact_ = RaggedStore.compact_

    def wrong(self, keep_N):
        compact_(self, keep_N)
        self.keys_CD.copy_(self.keys_CD.roll(1, 0))

    monkeypatch.setattr(RaggedStore, "compact_", wrong)
    monkeypatch.setattr(RaggedStore, "filter_", wrong)


@pytest.mark.parametrize(
    ("typed", "broken", "message"),
    [
        (DECODE.split(), lambda patch: scaled(patch, decode, 1.001), "ragged attention is wrong: error"),
        (EVICTION, lambda patch: scaled(patch, retain.hf.cache.engine, 1.01), "adakv is wrong: error"),
        (EVICTION, shifted, "adakv is wrong: error"),
        (
            EVICTION,
            lambda patch: patch.setattr(retain.hf.cache.engine.Engine, "_evict_again", lambda *a, **k: None),
            "adakv holds 1,024 entries after 0 evictions, wanted 960 after 1",
        ),
    ],
)
def test_nothing_is_timed_if_the_answer_is_wrong(typed, broken, message, monkeypatch, tmp_path, capsys):
    broken(monkeypatch)
    monkeypatch.setattr(decode, "interleave", None)
    monkeypatch.setattr(eviction, "interleave", None)
    assert main([*typed, "--output", str(tmp_path / "record.json")]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out and not list(tmp_path.iterdir())


def test_the_model_is_let_go(monkeypatch):
    models, build = [], eviction.model_of
    monkeypatch.setattr(eviction, "model_of", lambda settings: models.append(build(settings)) or models[-1])
    eviction.measure(TINY)
    assert attachment_of(models[0]) is None and not models[0].model._forward_hooks


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (DecodeSettings, {"rounds": 0, "keep_ratio": 2.0, "dtype": "int8"}, "rounds.*keep_ratio.*dtype is"),
        (DecodeSettings, {"heads": 5, "kv_heads": 2}, "heads 5 are not a multiple of kv_heads 2"),
        (DecodeSettings, {"evicted": 500}, "evicted 500 would empty the shortest row, of 328"),
        (EvictionSettings, {"policies": "snapvk,gate"}, "unknown policy 'snapvk'; 'gate' takes gates"),
        (EvictionSettings, {"context": 1024}, "longest row, of 1310 entries, is more than the context 1024"),
        (EvictionSettings, {"tokens_per_head": 80}, "row, of 32 entries, has no room for 4 first and the 32"),
        (EvictionSettings, {"heads": 5, "kv_heads": 2}, "heads 5 are not a multiple of kv_heads 2"),
        (EvictionSettings, {"policies": "pyramidkv"}, "'pyramidkv' gives layers or heads budgets of their"),
        (EvictionSettings, {"policies": ""}, "no policy to time"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, changes, message):
    refused(message, settings, **changes)


@pytest.mark.parametrize("change", ["layers=entropy", "head_classes=table.tsv", "quotas=calibrated"])
def test_only_even_budgets_have_rows_here(change):
    changed = [f"allocation.{change}", *(["scope=layer"] if "entropy" in change else [])]
    assert eviction.shares_evenly(load_policy("gate"))
    assert not eviction.shares_evenly(load_policy("gate", changed))
