"""Old configs, calls and commands are refused with what to use now."""

import re
from pathlib import Path

import pytest

import retain
from retain.config import load
from retain.eval import cli
from retain.eval.config import CompareConfig
from retain.gone import GONE, hint_of
from retain.train.recipe import DistillConfig
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: retain.load_policy("quest"), "'quest' (gone since 2026-11-29: use the preset quest_evict"),
        (
            lambda: retain.load_policy("think:layer"),
            "'think' (gone since 2026-11-29: use precision: {",
        ),
        (lambda: retain.load_policy("d2o"), "'d2o' (gone since 2026-11-29: use the preset merge"),
        (lambda: retain.load_policy("snapkv", ["observed=arkv"]), "'arkv' (gone since 2026-11-29"),
        (
            lambda: retain.load_policy("kivi", ["precision.keys=token"]),
            "'precision.keys' (gone since 2026-11-29: use the one layout",
        ),
        (
            lambda: retain.load_policy("snapkv", ["precision={channels: 0.6}"]),
            "'precision.channels' (gone since 2026-11-29: use bits",
        ),
        (
            lambda: retain.load_policy("merge", ["correction.threshold=moving"]),
            "got 'moving' (str) (gone since 2026-11-29: use a number",
        ),
        (
            lambda: retain.load_policy("snapkv", ["correction={ridge: 0.1}"]),
            "'correction.ridge' (gone since 2026-11-29: use correction: {threshold: 0.8}",
        ),
        (
            lambda: retain.load_policy("h2o", ["observed_settings.layer_weight=variance"]),
            "'layer_weight' (gone since 2026-11-29: use observed: cake",
        ),
        (lambda: retain.load_policy("fused", ["fusion=veto"]), "'veto' (gone since 2026-11-29: use fusion"),
        (lambda: retain.load_policy("fused", ["allocation.quotas=calibrated"]), "use scope: model"),
        (lambda: retain.load_policy("snapkv", ["selection={shared: layer}"]), "use each head keeps"),
        (lambda: retain.Cache(tiny_model(), "snapkv", bytes_total=9999), "use bytes, of each sequence"),
        (lambda: retain.load_policy("snapkv", ["protection.turns=true"]), "use pinned spans of the first"),
        (
            lambda: retain.Cache(tiny_model(), "snapkv", keep_ratio=0.5, tokenizer=object()),
            "use pinned spans",
        ),
        (lambda: retain.load_policy("compresskv"), "'compresskv' (gone since 2026-11-29: use snapkv"),
        (
            lambda: retain.load_policy("duoattention", ["allocation.head_classes=heads.tsv"]),
            "use allocation.wei",
        ),
        (
            lambda: retain.load_policy("headkv", ["allocation.importance_beta=2"]),
            "use --beta of python -m retain",
        ),
        (
            lambda: retain.load_policy("snapkv", ["allocation.layers=errors"]),
            "use allocation.layers: pyramid",
        ),
        (lambda: retain.load_policy("snapkv:released"), "'snapkv:released' (gone since 2026-11-29: use the"),
        (lambda: retain.load_policy("defensivekv:code"), "use observed_settings.norm=head_share"),
        (
            lambda: retain.load_policy("snapkv", ["observed_settings.force_window=true"]),
            "use protection.recent",
        ),
        (lambda: retain.load_policy("recency", ["observed_settings.sinks=4"]), "use protection.sinks"),
        (lambda: retain.load_policy("adakv:paper"), "'adakv:paper' (gone since 2026-11-29: use the policy's"),
        (
            lambda: retain.load_policy("adakv", ["allocation.safeguard=convex"]),
            "use allocation.safeguard: gua",
        ),
        (lambda: retain.load_policy("pyramidkv", ["allocation.line=whole"]), "'allocation.line' (gone since"),
        (
            lambda: retain.load_policy("defensivekv", ["first_stage.by=mass_press"]),
            "use first_stage.by: mass",
        ),
        (
            lambda: load(ROOT / "configs/compare/demo.yaml", CompareConfig, ["engine=vllm"]),
            "unknown key 'engine' (gone since 2026-11-29: use regimes=[query_aware]",
        ),
        (
            lambda: load(ROOT / "configs/distill/smollm2.yaml", DistillConfig, ["features.folder=x"]),
            "unknown key 'features' (gone since 2026-11-29: use no folder",
        ),
        (
            lambda: load(ROOT / "configs/distill/smollm2.yaml", DistillConfig, ["calibration.quotas=true"]),
            "unknown key 'calibration.quotas' (gone since 2026-11-29",
        ),
        (lambda: retain.Cache(tiny_model(), "snapkv", keep_ratio=0.5, capacity="warn"), "use a keep_ratio"),
        (lambda: retain.Cache(tiny_model(), "snapkv", keep_ratio=0.5, page=16), "use the budget alone,"),
        (
            lambda: load(ROOT / "configs/compare/demo.yaml", CompareConfig, ["page=16", "regimes=[served]"]),
            "'served' (gone since 2026-11-29: use query_aware",
        ),
    ],
)
def test_what_went_is_refused_with_what_to_use_now(call, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call()


def test_a_command_that_went_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "--config", "x.yaml"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'study' (gone since 2026-11-29" in said and said.count("\n") == 1


def test_every_name_that_went_stands_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in GONE if name.rpartition(".")[2] not in text] == []
    assert hint_of("allocation.layers") == ""
