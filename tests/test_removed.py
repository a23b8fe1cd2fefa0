"""Old configs, calls and commands are refused with what to use now."""

import re
from pathlib import Path

import pytest

import retain
from retain.config import load
from retain.eval import cli
from retain.eval.config import CompareConfig
from retain.process.removed import REMOVED, hint_of
from retain.train.recipe import DistillConfig
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[1]
COMPARE, DISTILL = ROOT / "configs/compare/demo.yaml", ROOT / "configs/distill/smollm2.yaml"


# A name of each kind: preset, variant, score, setting of a score, key, value of a key, section, argument.
CALLS = [
    (lambda: retain.load_policy("quest"), "'quest' (removed; now: the preset quest_evict"),
    (lambda: retain.load_policy("think:layer"), "'think' (removed; now: precision: {"),
    (lambda: retain.load_policy("snapkv:released"), "'snapkv:released' (removed; now: the"),
    (lambda: retain.load_policy("snapkv", ["observed=arkv"]), "'arkv' (removed"),
    (lambda: retain.load_policy("recency", ["observed_settings.sinks=4"]), "now: protection.sinks"),
    (lambda: retain.load_policy("merge", ["correction.threshold=moving"]), "got 'moving' (str) (removed"),
    (lambda: retain.Cache(tiny_model(), "snapkv", keep_ratio=0.5, page=16), "now: the budget alone,"),
    (lambda: load(COMPARE, CompareConfig, ["engine=vllm"]), "'engine' (removed; now: question"),
    (lambda: load(DISTILL, DistillConfig, ["calibration.quotas=true"]), "'calibration.quotas' (removed"),
]


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_what_went_is_refused_with_what_to_use_now(call, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        call()


def test_a_command_that_went_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "--config", "x.yaml"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'study' (removed" in said and said.count("\n") == 1


def test_every_name_that_went_stands_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in REMOVED if name.rpartition(".")[2] not in text] == []
    assert hint_of("allocation.layers") == ""
