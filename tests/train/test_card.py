"""The training card: a model card that parses, says what was measured, and is not broken by its contents."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from retain.gates import build_gates
from retain.gates.artifact import read_metadata, save_gates
from retain.gates.card import card_of
from retain.train.distill import distill
from retain.train.run.artifact import command_line

WRITTEN = """
family: mlp
unit: log_risk
layers: {"0": {}, "10": {}}
base_model: owner/model
base_revision: abc123
protected_window: 32
target: {horizon: 32, sources: {own: 1.0}}
loss: {terms: {mse: 1.0}}
data: {source: hub, path: owner/data, held_out: 16, max_tokens: 4096, appendix: "\n{question}|"}
config: {stage: local, dtype: bfloat16, training: {steps: 4}}
command: accelerate launch train/distill.py
training: {steps: 4, num_processes: 2, tokens: 123456, seconds: 61.0, parameters: 1234,
  held_out: {loss: 0.5, overlap: 0.625, overlap_random: 0.21, overlap_recency: 0.12, overlap_value_norm: 0.3}}
provenance: {clean: true, python: "3.11", platform: Linux x86_64, device: cpu}
calibration:
  settings: {kind: shared}
  documents: {fitted: 8, reported: 7}
  unit: {before: rank, after: risk}
  layers: {"0": {kind: shared, H: 2, K: 16, space: asinh, unit: risk}}
  curve: {keep_ratio: [0.1], threshold: [0.5]}
license: apache-2.0
"""
METADATA: dict[str, Any] = yaml.safe_load(WRITTEN)
METADATA["provenance"] |= {"commit": "f" * 40, "versions": {"torch": "2.13", "deepspeed": None}}


def front_matter(text: str) -> dict[str, Any]:
    start, front, rest = text.split("---\n", 2)
    assert start == "" and rest.strip()
    return yaml.safe_load(front)


def test_the_card_says_what_was_made_how_and_how_well() -> None:
    text = str(card_of(METADATA, place="g"))
    assert front_matter(text) == {
        **{"library_name": "retain", "base_model": "owner/model", "base_model_relation": "adapter"},
        "license": "apache-2.0",
        "tags": ["kv-cache", "kv-cache-eviction", "retention-gate", "gate-mlp"],
        "datasets": ["owner/data"],
    }
    for line in (
        "| **these gates** | **0.625** |",
        "| random | 0.210 |",
        "| recency | 0.120 |",
        "| value norm | 0.300 |",
        "Held-out losses: loss 0.500.",
        "| `target.sources.own` | `1.0` |",
        "attention layers, 1,234 parameters, output",
        "fitted to 8 held-out documents and reported on 7 others",
        "in units of `rank` before, `risk` after.",
        "````bash\naccelerate launch train/distill.py\n````",
        "4 steps, 2 process(es), 123,456 tokens, 61 seconds of training.",
        "revision `abc123`",
        "retain.load_gates('g', model)",
        "- Trained on contexts of at most 4,096 tokens",
        "retain.load('owner/model', revision='abc123')",
        "- Licence: `apache-2.0`; the base model has its own.",
    ):
        assert line in text, line
    assert text.count("\n## ") == 7


def test_a_run_writes_what_the_card_reads(make_config: Callable[..., Any]) -> None:
    """Each key of the metadata above is one that a real run writes, and its card has all sections."""
    config = make_config(
        stage="end_to_end",
        soft={"terms": {"kl_forward": 1.0, "capacity_global": 1.0}, "protected": 4, "budget": 16},
        **{"training.steps": 1},
    )
    folder = distill(config)
    made, text = read_metadata(folder), (folder / "README.md").read_text()

    def paths(value: Any, prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        if not isinstance(value, dict):
            return {prefix}
        return {path for key, inner in value.items() for path in paths(inner, (*prefix, key))}

    # Layers and keep_ratios are named by numbers, and are other ones here.
    made_up, real = (
        {
            tuple("#" if re.fullmatch(r"[\d.]+", key) else key for key in path)
            for path in paths(given["calibration"])
        }
        for given in (METADATA, made)
    )
    assert made_up <= real, made_up - real
    assert set(METADATA["training"]) <= set(made["training"])
    trained = sum(one.numel() for one in load_file(folder / "gates.safetensors").values())
    assert 0 < made["training"]["parameters"] <= trained
    assert f"{made['training']['parameters']:,} parameters" in text
    assert text.count("\n## ") == 7


def test_what_was_not_measured_is_not_in_the_card() -> None:
    text = str(card_of({"base_model": "/a/folder", "family": "linear", "layers": {}}))
    assert front_matter(text)["tags"][-1] == "gate-linear"
    assert "base_model" not in front_matter(text) and "datasets" not in front_matter(text)
    for word in ("overlap |", "Calibration", "```bash", "Commit", "None"):
        assert word not in text, word


def test_contents_cannot_break_the_card() -> None:
    nasty = {
        **METADATA,
        "base_model": "a|b<script>`x`",
        "data": {"source": "jsonl", "path": "x|y`z\n# heading", "appendix": "\n{question}\n"},
        "license": "other: [x]",
        "command": "a ``` b",
        "provenance": {**METADATA["provenance"], "platform": "# no heading | <b>here</b>"},
    }
    text = str(card_of(nasty))
    assert front_matter(text)["license"] == "other: [x]"
    text = text.replace("\\`", "")  # an escaped one opens nothing
    prose = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text, flags=re.S)  # what is code cannot be markup
    assert "<script>" not in prose and "<b>" not in prose and "\n# heading" not in text
    assert text.count("\n# ") == 1 and "# no heading \\| &lt;b&gt;here" in text
    for row in [line for line in text.splitlines() if line.startswith("| `path`")]:
        assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert "````bash\na ``` b\n````" in text
    assert r"| `appendix` | `\"" not in text and r'`"\n{question}\n"`' in text


@pytest.mark.parametrize(
    ("program", "said"),
    [("retain train", "retain train tiny 'a b.jsonl'"), ("x.py", "accelerate launch x.py tiny 'a b.jsonl'")],
)
def test_the_command_of_a_run_can_be_typed_again(program: str, said: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", [program, "tiny", "a b.jsonl"])
    assert command_line() == said


def test_the_lines_of_the_card_load_the_gates_and_answer(tmp_path: Path) -> None:
    """The card's example runs, against a real artifact of a reference model."""
    from retain.hf.model.decoder import describe
    from retain.hf.model.identity import fingerprint
    from retain.reference import load_model

    model = load_model()
    gates = build_gates(
        "linear", {s.layer_idx: {"E": s.hidden_size, "H": s.num_kv_heads} for s in describe(model)}
    )
    save_gates(gates, tmp_path, fingerprint=fingerprint(model), metadata={"base_model": "reference:0"})
    text = str(card_of(read_metadata(tmp_path), place=str(tmp_path)))
    code = text.split("```python\n")[1].split("```")[0]
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["cache"].num_seen > 0 and space["output"].shape[1] > space["inputs"].input_ids.shape[1]
