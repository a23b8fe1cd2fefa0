"""The benchmark of engines, with numbers in the place of engines."""

import json

import pytest

from retain.eval.speed import engine
from retain.eval.speed.__main__ import main
from retain.eval.speed.engine import EngineSettings
from retain.eval.speed.engine_side import STAGES
from tests.refused import refused

TYPED = "--what engine --layers 1 --width 16 --heads 2 --kv-heads 1 --intermediate 16 --requests 2 --rounds 2"
QUANTITIES = ("wall_s", "tokens_per_s", "steps", "step_ms", "ttft_s", "at_once", "most_at_once")


@pytest.fixture
def opened(monkeypatch):
    """What engines are opened with; they take half the time of plain vLLM at keep_ratio 0.2."""
    found = []

    class Numbers(engine.Engine):
        def __init__(self, opening):
            self.opening = opening
            found.append(opening)

        def call(self, function, load):
            fast = load.extra.get("retain.keep_ratio") == 0.2
            made = dict.fromkeys((*QUANTITIES, "held_a_request", "most_held"), 0.5 if fast else 1.0)
            made |= {f"{stage}_ms": 100.0 for stage in STAGES} if load.clocks else {}
            return made | {"preempted": 0.0}

        def close(self):
            found.append("closed")

    monkeypatch.setattr(engine, "Engine", Numbers)
    monkeypatch.setattr(engine, "require", lambda *_, **__: None)
    return found


def test_engines_of_equal_pools_are_timed_beside_one_another(opened, tmp_path, capsys):
    output = tmp_path / "engine.json"
    assert (
        main([*TYPED.split(), "--lengths", "64,128", "--keep-ratios", "0.2,0.4", "--output", str(output)])
        == 0
    )
    rows = json.loads(output.read_text())["rows"]
    cells = [("plain", 1.0), ("off", 1.0), ("fused", 0.2), ("fused", 0.4)]
    assert [(row["policy"], row["keep_ratio"]) for row in rows] == cells * 2
    plain, evicting = opened[:2]
    assert plain.retain is None and evicting.retain["policy"] == "fused" and "gates" in evicting.retain
    assert plain.settings == evicting.settings and opened.count("closed") == 4
    # Four requests of 64 and 128 tokens in blocks of 32, and the engine's own.
    assert plain.settings["num_gpu_blocks_override"] == 4 * 6 + 1
    assert plain.settings["kv_cache_memory_bytes"] == 25 * 32 * 2 * 8 * 4
    assert rows[2]["steps_over_plain"]["median"] == 0.5 and rows[3]["steps_over_plain"]["median"] == 1.0
    assert rows[2]["eviction_share"]["median"] == 0.2  # 100 ms of half a second
    assert "steps_over_plain" not in rows[0] and "eviction_share" not in rows[1]
    text = capsys.readouterr().out
    assert "prompts of 128 tokens, a pool of 32 blocks" in text and text.count("fused   0.2") == 4


def test_what_cannot_be_timed_is_refused(tmp_path):
    refused(
        "lengths are numbers above 0.*model is random or reference, got 'r'",
        EngineSettings,
        lengths="x",
        model="r",
    )
    long = EngineSettings(lengths="16384")
    refused("has 16384 positions: take shorter ones", engine.write_model, long, tmp_path)
