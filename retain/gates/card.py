"""Writes the card of gates: a Hugging Face model card, from the record of an artifact.

Every number is read from `gates.json`, and what it does not hold is not in the card; so a card can be made
again at any time.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from retain.config import leaves
from retain.process.extras import require

CARD, TEMPLATE = "README.md", Path(__file__).with_name("card.md.jinja")
# Scores that cost no training, which the overlap of gates is printed beside.
BASELINES = {
    "overlap_random": "random",
    "overlap_recency": "recency",
    "overlap_value_norm": "value norm",
}


def card_of(metadata: Mapping[str, Any], *, place: str = "FOLDER") -> ModelCard:
    """Returns the card of an artifact from its metadata, `card.md.jinja` filled in; `place` is its folder or
    hub id, for the example."""
    require("train", "jinja2", what="the card of gates")
    base = str(metadata.get("base_model", "not stated"))
    last = (metadata.get("training") or {}).get("held_out") or {}
    baselines = [[label, _number(last[key])] for key, label in BASELINES.items() if key in last]
    losses = {
        name: _number(float(value))
        for name, value in last.items()
        if isinstance(value, int | float) and not name.startswith("overlap")
    }
    sections: dict[str, Any] = {
        name: metadata.get(name) or {} for name in ("data", "training", "calibration", "provenance")
    }
    return ModelCard.from_template(
        _front_matter(metadata, base),
        template_path=str(TEMPLATE),
        m=metadata,
        base=base,
        place=place,
        command=metadata.get("command"),
        **sections,
        last=last,
        baselines=baselines,
        losses=losses,
        recipe=_recipe(metadata),
        plain=_plain,
        code=_code,
        table=_table,
        settings=_settings,
    )


def _plain(value: Any) -> str:
    """Text that means itself in a line or a table's cell of Markdown."""
    text = " ".join(str(value).split())
    for sign in "\\`*_|[]":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _code(value: Any) -> str:
    """A value as code, in one line."""
    plain = isinstance(value, str) and value == " ".join(value.split())
    text = value if plain else json.dumps(value, ensure_ascii=False)
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _number(value: Any) -> str:
    """Three decimals, or three digits of what would be 0.000."""
    if not isinstance(value, float):
        return _plain(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 5e-4 else f"{value:.3g}"


def _front_matter(metadata: Mapping[str, Any], base: str) -> ModelCardData:
    """The metadata that the hub reads. A base model that is no repository there is not named as one."""
    path, data = Path(base), metadata.get("data") or {}
    on_hub = base.count("/") == 1 and not path.is_absolute() and not path.exists() and base[0] != "."
    return ModelCardData(
        library_name="retain",
        base_model=base if on_hub else None,
        base_model_relation="adapter" if on_hub else None,
        license=metadata.get("license"),
        tags=["kv-cache", "kv-cache-eviction", "retention-gate", f"gate-{metadata.get('family', '')}"],
        datasets=[str(data["path"])] if data.get("source") == "hub" and data.get("path") else None,
    )


def _settings(mapping: Mapping[str, Any]) -> str:
    stated = {key: value for key, value in leaves(mapping).items() if value is not None}
    rows = [[_code(key), _code(value).replace("|", "\\|")] for key, value in stated.items()]
    return _table(["setting", "value"], rows)


def _recipe(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were used: a section that the stage did not use is None in the metadata."""
    config = metadata.get("config") or {}
    stage = metadata.get("stage") or config.get("stage")
    sections = ("gate", "target", "loss", *(("soft",) if stage == "end_to_end" else ()))
    chosen = {"stage": stage} | {name: metadata.get(name, config.get(name)) for name in sections}
    chosen |= {name: config.get(name) for name in ("training", "dtype")}
    return {name: value for name, value in chosen.items() if value}
