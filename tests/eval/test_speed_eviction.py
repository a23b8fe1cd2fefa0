import json

import pytest
import torch

import retain
from retain.cache.store import RaggedStore
from retain.eval.speed import eviction as speed_eviction
from retain.eval.speed.eviction import (
    SINKS,
    Setting,
    benchmark,
    columns_held,
    extend_,
    main,
    model_of,
    rows_held,
)
from retain.hf.intercept.attach import attach, attachment_of
from retain.presets import load_policy

SHAPE = {"batch": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "width": 8, "threads": 1}
TINY = Setting(**SHAPE, context=300, tokens_per_head=120, every=8, rounds=2, policies="adakv")


def typed(*rest: str) -> list[str]:
    return [
        part for name, value in vars(TINY).items() for part in (f"--{name.replace('_', '-')}", str(value))
    ] + [*rest]


def test_the_defaults_are_the_case_that_was_asked_for():
    default = Setting()
    shape = (default.batch, default.heads, default.kv_heads, default.width, default.hidden)
    assert shape == (4, 32, 8, 128, 4096) and (default.intermediate, default.layers) == (14336, 2)
    assert (default.context, default.tokens_per_head, default.every, default.threads) == (4096, 819, 32, 2)
    assert default.tokens_per_head == int(0.2 * default.context)


def test_heads_hold_tokens_of_their_own():
    setting = Setting()
    for scope in ("head", "layer", "model"):
        for mask_BHT in rows_held(setting, scope):
            lengths_BH = mask_BHT.sum(-1)
            assert (lengths_BH.sum(-1) == 8 * 819).all()
            assert int(lengths_BH.max()) / int(lengths_BH.min()) == pytest.approx(
                1.0 if scope == "head" else 4.0, rel=0.02
            )
            assert mask_BHT[..., :SINKS].all() and mask_BHT[..., -setting.read :].all()
            # Independent choices of a fifth: eight heads together hold most of what was seen.
            assert 0.7 < mask_BHT.any(1).float().mean() < 0.9


def test_a_cache_is_extended_to_what_it_would_hold():
    masks = rows_held(TINY, "layer")
    model = model_of(TINY)
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
        for b in range(2):
            for h in range(2):
                keys, values, positions = layer.store.row(b, h)
                assert positions.tolist() == mask_BHT[b, h].nonzero().flatten().tolist()
                assert torch.equal(
                    keys[-TINY.read :], old.row(b, h)[0]
                )  # those that were read are as they were
                assert torch.equal(values[-TINY.read :], old.row(b, h)[1])
                assert keys.unique(dim=0).shape == keys.shape  # and no two of the others are alike


def test_a_record_has_both_readings_of_a_step(tmp_path, capsys):
    output, policies = tmp_path / "runs" / "eviction.json", "snapkv,adakv,layer_defensivekv,h2o"
    assert main(typed("--periods", "2", "--policies", policies, "--output", str(output))) == 0
    record = json.loads(output.read_text())
    assert list(record["policies"]) == policies.split(",")
    shown = capsys.readouterr().out
    assert output.with_suffix(".txt").read_text() in shown
    for name, row in record["policies"].items():
        assert row["check"]["error"] <= row["check"]["allowed"]
        held = row["held"]
        assert held["mean"] == 120 and (held["min"] < 120 < held["max"]) == (row["scope"] != "head")
        assert 120 + 8 < row["columns"] <= TINY.context + 8
        assert {len(times["all"]) for times in row["ms_a_step"].values()} == {TINY.rounds}
        assert set(row["ratios"]) == {"whole step", "attention alone"}
        assert f"{name}, of the attention alone" in shown and f"{row['columns']:,}" in shown


def broken(monkeypatch, how):
    if how == "attention":
        attend = retain.hf.cache.engine.attend
        monkeypatch.setattr(retain.hf.cache.engine, "attend", lambda *a, **k: attend(*a, **k) * 1.01)
    elif how == "compaction":
        compact_ = RaggedStore.compact_

        def shifted(self, keep_N):
            compact_(self, keep_N)
            self.keys_CD.copy_(self.keys_CD.roll(1, 0))

        monkeypatch.setattr(RaggedStore, "compact_", shifted)
        monkeypatch.setattr(RaggedStore, "filter_", shifted)
    else:
        monkeypatch.setattr(retain.hf.cache.engine.Engine, "_evict_again", lambda *args, **settings: None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("attention", "adakv is wrong: error"),
        ("compaction", "adakv is wrong: error"),
        ("eviction", "adakv holds 1,024 entries after 0 evictions, wanted 960 after 1"),
    ],
)
def test_nothing_is_timed_if_the_answer_is_wrong(how, message, monkeypatch, tmp_path, capsys):
    broken(monkeypatch, how)
    monkeypatch.setattr(speed_eviction, "clock", None)
    threads = torch.get_num_threads()
    assert main(typed("--output", str(tmp_path / "eviction.json"))) == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out
    assert not list(tmp_path.iterdir()) and torch.get_num_threads() == threads


def test_the_model_is_let_go(monkeypatch):
    models, build = [], speed_eviction.model_of
    monkeypatch.setattr(
        speed_eviction, "model_of", lambda setting: models.append(build(setting)) or models[-1]
    )
    benchmark(TINY)
    assert attachment_of(models[0]) is None and not models[0].model._forward_hooks


def test_only_even_budgets_have_rows_here():
    plain = load_policy("gate")
    assert speed_eviction._shares_evenly(plain)
    for change in ("layers=entropy", "head_classes=table.tsv", "quotas=calibrated"):
        changed = [f"allocation.{change}", *(["scope=layer"] if "entropy" in change else [])]
        assert not speed_eviction._shares_evenly(load_policy("gate", changed)), change


def test_settings_that_do_not_fit_are_all_named():
    with pytest.raises(
        ValueError, match=r"unknown policy 'snapvk'; 'gate' takes gates; rounds .* at least 2, got 1"
    ):
        Setting(policies="snapvk,gate", rounds=1)
    with pytest.raises(ValueError, match="longest row, of 1310 entries, is more than the context 1024"):
        Setting(context=1024)
    with pytest.raises(ValueError, match="shortest row, of 32 entries, has no room for 4 first and the 32"):
        Setting(tokens_per_head=80)
    with pytest.raises(ValueError, match="heads 5 are not a multiple of kv_heads 2"):
        Setting(heads=5, kv_heads=2)
    with pytest.raises(ValueError, match="'pyramidkv' gives layers or heads budgets of their own"):
        Setting(policies="pyramidkv")
    with pytest.raises(ValueError, match="no policy to time"):
        Setting(policies="")
