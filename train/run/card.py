"""Writes the training card, `README.md` of an artifact: a Hugging Face model card.

    python -m retain.train.run.card FOLDER

Every number is read from the run's own files (`gates.json`, `log.jsonl`), and what a file does not hold is
not in the card; so a card can be made again at any time.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from retain.config import leaves
from retain.gates.store import read_metadata, write_beside
from retain.process.command import status_of
from retain.train.run.checkpoint import read_log
from retain.train.run.curves import BASELINES, CURVES, HEADS, draw_all

CARD = "README.md"


def write_card(folder: Path | str, *, command: str = "", say: Callable[[str], None] = print) -> Path:
    """Draw the pictures and write the card into an artifact's folder.

    Args:
        folder: of a finished run.
        command: that started it; empty: what the artifact says.
        say: told if there are no pictures.

    Returns:
        path of the card.

    Raises:
        ValueError: there is no artifact.
    """
    folder = Path(folder)
    metadata, records = read_metadata(folder), read_log(folder)
    pictures, reason = draw_all(folder, records, _overlap_of(metadata, records))
    if reason is not None:
        say(reason)
    text = card_text(metadata, records, command=command, pictures=pictures, folder=folder.name)
    path = folder / CARD
    os.replace(write_beside(path, text.encode()), path)
    return path


def _looks(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record["held_out"] for record in records if record.get("held_out")]


def _overlap_of(
    metadata: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> Mapping[str, Sequence[float]]:
    """Layer -> overlap of each head, of the last look at the held-out documents."""
    last = metadata.get("training", {}).get("held_out") or {}
    found: Mapping[str, Sequence[float]] = last.get("overlap_of") or next(
        (look["overlap_of"] for look in reversed(_looks(records)) if look.get("overlap_of")), {}
    )
    return {str(layer): heads for layer, heads in found.items()}


def card_text(
    metadata: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    *,
    command: str = "",
    pictures: Sequence[str] = (),
    folder: str = "FOLDER",
) -> str:
    """The card.

    Args:
        metadata: `gates.json` of the artifact.
        records: of `log.jsonl`.
        command: that started the run; empty: what the metadata say.
        pictures: names of the files beside the card.
        folder: name of the artifact's folder, for the example.
    """
    base = str(metadata.get("base_model", "not stated"))
    parts = [
        _front_matter(metadata, base),
        f"# Retention gates for {_plain(base)}",
        _about(metadata, base),
        _section("How to load", _how_to_load(metadata, base, folder)),
        _section("Results", _results(metadata, records, pictures)),
        _section("Recipe", _recipe(metadata)),
        _section("Data", _data(metadata)),
        _section("Is the gate what answers?", _report(metadata.get("noop"))),
        _section("Calibration", _calibration(metadata.get("calibration"))),
        _section("How it was made", _made(metadata, command)),
        _section("Limits", _limits(metadata, base)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _plain(value: Any) -> str:
    """Text that means itself in a line or a table's cell of Markdown."""
    text = " ".join(str(value).split())
    for sign in "\\`*_|[]":
        text = text.replace(sign, f"\\{sign}")
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    return f"\\{text}" if text[:1] in ("#", "+", "-", "=") else text


def _code(value: Any) -> str:
    """A value as code; a table's cell escapes what would end it."""
    plain = isinstance(value, str) and value == " ".join(value.split())
    text = value if plain else json.dumps(value, ensure_ascii=False)  # a line break shows as \\n
    fence = "``" if "`" in text else "`"
    room = " " if fence == "``" else ""
    return f"{fence}{room}{text}{room}{fence}"


def _fenced(text: str, language: str = "") -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"| {' | '.join('---' for _ in header)} |"]
    for row in rows:
        cells = [re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _front_matter(metadata: Mapping[str, Any], base: str) -> str:
    """What the hub reads. A base model that is no repository there is not named as one."""
    front: dict[str, Any] = {"library_name": "retain"}
    path = Path(base)
    if base.count("/") == 1 and not path.is_absolute() and not path.exists() and not base.startswith("."):
        front |= {"base_model": base, "base_model_relation": "adapter"}
    if metadata.get("license"):
        front["license"] = str(metadata["license"])
    front["tags"] = ["kv-cache", "kv-cache-eviction", "retention-gate", f"gate-{metadata.get('family', '')}"]
    data = metadata.get("data") or {}
    if data.get("source") == "hub" and data.get("path"):
        front["datasets"] = [str(data["path"])]
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---"


def _about(metadata: Mapping[str, Any], base: str) -> str:
    layers = metadata.get("layers") or {}
    revision = metadata.get("base_revision")
    model = (metadata.get("fingerprint") or {}).get("model_type")
    number = (metadata.get("training") or {}).get("parameters")
    size = f", {number:,} parameters" if isinstance(number, int) else ""
    return (
        f"For each entry of the key-value cache of {_code(base)}"
        + (f" (revision {_code(revision)})" if revision else "")
        + (f", a {_plain(model)} model" if model else "")
        + f", these gates say how much later tokens will need it; the model itself is unchanged. Family "
        f"{_code(metadata.get('family', 'not stated'))}, one gate in each of {len(layers)} attention "
        f"layers{size}, output in units of {_code(metadata.get('unit', 'not stated'))}."
    )


def _how_to_load(metadata: Mapping[str, Any], base: str, folder: str) -> str:
    reference = base.startswith("reference:")
    model = (
        f"model = retain.reference.load_model(seed={base.partition(':')[2]})"
        if reference
        else f"model = transformers.AutoModelForCausalLM.from_pretrained({base!r})"
    )
    imports = "import retain, retain.reference" if reference else "import retain, transformers"
    lines = [
        imports,
        model,
        f"cache = retain.Cache(model, policy='gate', keep_ratio=0.2, gates=retain.load_gates({folder!r}, "
        "model))",
    ]
    window = metadata.get("protected_window")
    after = (
        f"\n\nTrained to judge entries that are at least {window} tokens old: protect as many recent ones "
        "(every preset's `protection.recent` does)."
        if window
        else ""
    )
    return _fenced("\n".join(lines), "python") + after


def _number(value: Any) -> str:
    """Three decimals, or three digits of what would be 0.000."""
    if not isinstance(value, float):
        return _plain(value)
    return f"{value:.3f}" if value == 0 or abs(value) >= 5e-4 else f"{value:.3g}"


def _results(
    metadata: Mapping[str, Any], records: Sequence[Mapping[str, Any]], pictures: Sequence[str]
) -> str:
    looks = _looks(records)
    last = (metadata.get("training") or {}).get("held_out") or (looks[-1] if looks else {})
    parts = []
    if "overlap" in last:
        data = metadata.get("data") or {}
        count = data.get("held_out_used") or data.get("held_out")
        documents = f"{count} documents" if count else "documents"
        parts.append(
            f"Overlap with the target's top fifth on held-out {documents} (1 is perfect; mean over layers "
            "and heads):"
        )
        rows = [["**these gates**", f"**{last['overlap']:.3f}**"]]
        for key, (label, _) in BASELINES.items():
            value = next((look[key] for look in (last, *looks) if key in look), None)
            if value is not None:
                rows.append([label, _number(value)])
        parts.append(_table(["score", "overlap"], rows))
    others = {
        name: value
        for name, value in last.items()
        if isinstance(value, int | float) and not name.startswith("overlap")
    }
    if others:
        parts.append(
            "Held-out losses: "
            + ", ".join(f"{_plain(n)} {_number(float(v))}" for n, v in others.items())
            + "."
        )
    overlap_of = _overlap_of(metadata, records)
    if overlap_of:
        rows = [
            [layer, f"{sum(heads) / len(heads):.3f}", f"{min(heads):.3f}", f"{max(heads):.3f}"]
            for layer, heads in sorted(overlap_of.items(), key=lambda item: int(item[0]))
        ]
        parts.append(_table(["layer", "overlap, mean of heads", "worst head", "best head"], rows))
    titles = {CURVES: "loss and overlap against the step", HEADS: "held-out overlap of every head"}
    parts += [f"![{titles.get(name, name)}]({name})" for name in pictures]
    return "\n\n".join(parts)


def _settings(mapping: Mapping[str, Any]) -> str:
    stated = {key: value for key, value in leaves(mapping).items() if value is not None}
    return _table(["setting", "value"], [[_code(key), _code(value)] for key, value in stated.items()])


def _recipe(metadata: Mapping[str, Any]) -> str:
    config = metadata.get("config") or {}
    stage = metadata.get("stage") or config.get("stage")
    chosen: dict[str, Any] = {"stage": stage} if stage else {}
    sections = ["gate", "target", "loss", *(["soft"] if stage == "end_to_end" else [])]
    for name in sections:
        # What this stage did not use, the metadata say is nothing.
        value = metadata[name] if name in metadata else config.get(name)
        if value:
            chosen[name] = value
    if config.get("training"):
        chosen["training"] = config["training"]
    if config.get("dtype"):
        chosen["dtype"] = config["dtype"]
    return _settings(chosen) if chosen else ""


def _data(metadata: Mapping[str, Any]) -> str:
    data = metadata.get("data")
    return _settings(data) if data else ""


def _report(report: Mapping[str, Any] | None) -> str:
    """What was looked at after training: its verdict, and a table of its leaves."""
    if not report:
        return ""
    verdict = report.get("verdict")
    rest = {key: value for key, value in report.items() if key != "verdict"}
    # Per-layer tables belong to the JSON, not to a page.
    short = {
        key: value
        for key, value in leaves(rest).items()
        if not isinstance(value, list | tuple) or len(value) <= 8
    }
    table = _table(
        ["", ""],
        [
            [_code(key), _number(value) if isinstance(value, float) else _code(value)]
            for key, value in short.items()
        ],
    )
    return "\n\n".join(part for part in (_plain(verdict) if verdict else "", table if short else "") if part)


def _calibration(record: Mapping[str, Any] | None) -> str:
    """What calibration changed, on the half of the held-out documents that nothing was fitted to; curves and
    weights of every head stay in the JSON."""
    if not record:
        return ""
    documents, unit, report = record["documents"], record["unit"], record["report"]
    parts = [
        f"{_code(record['settings']['kind'])}, fitted to {documents['fitted']} held-out documents and "
        f"reported on {documents['reported']} others; scores in units of {_code(unit['before'])} before, "
        f"{_code(unit['after'])} after. Share of the target that is kept, where the heads of a layer or of "
        "the model compete (inside a head, the order is the same):"
    ]
    before, after = (report[name]["keep"] for name in ("before", "after"))
    sides = [(scope, side) for scope in ("layer", "model") for side in (before, after)]
    names = ["keep_ratio", "head", "layer, before", "after", "model, before", "after"]
    rows = [
        [ratio, _number(before[ratio]["head"]["kept"])]
        + [_number(side[ratio][scope]["kept"]) for scope, side in sides]
        for ratio in before
    ]
    parts.append(_table(names, rows))
    if quotas := report.get("quotas"):
        parts.append(
            "Share of the whole model's target that is kept where every head gets as much, its stored quota "
            "(`allocation.quotas: calibrated` of a policy), what it wins by score, or what it wins by target:"
        )
        shown = list(next(iter(quotas.values())))
        rows = [[ratio, *(_number(kept[name]) for name in shown)] for ratio, kept in quotas.items()]
        parts.append(_table(["keep_ratio", *(name.replace("_", " ") for name in shown)], rows))
    if fusion := report.get("fusion"):
        parts.append("The same inside a head, of scores that are fused with what is observed:")
        shown = list(next(iter(next(iter(fusion.values())).values())))
        rows = [
            [_code(how), ratio, *(_number(shares[name]) for name in shown)]
            for how, of_ratio in fusion.items()
            for ratio, shares in of_ratio.items()
        ]
        parts.append(_table(["fusion", "keep_ratio", *shown], rows))
    return "\n\n".join(parts)


def _made(metadata: Mapping[str, Any], command: str) -> str:
    command = command or str(metadata.get("command") or "")
    parts = [_fenced(command, "bash")] if command else []
    training = metadata.get("training") or {}
    facts = []
    if training.get("steps"):
        facts.append(f"{training['steps']} steps")
    if training.get("num_processes"):
        facts.append(f"{training['num_processes']} process(es)")
    if training.get("tokens"):
        facts.append(f"{training['tokens']:,} tokens")
    if training.get("seconds"):
        facts.append(f"{training['seconds']:,.0f} seconds of training")
    if facts:
        parts.append(", ".join(facts) + ".")
    origin = metadata.get("provenance") or {}
    if origin:
        commit, state = origin.get("commit") or "unknown", ""
        if origin.get("commit"):
            state = ", clean" if origin.get("clean") else ", with changes that are in no commit"
        versions = ", ".join(
            f"{_plain(name)} {_plain(version)}"
            for name, version in (origin.get("versions") or {}).items()
            if version
        )
        parts.append(
            f"Commit {_code(commit)}{state}; {_plain(origin.get('platform', ''))}, "
            f"{_plain(origin.get('device', ''))}; Python {_plain(origin.get('python', ''))}, {versions}."
        )
    if metadata.get("sha256"):
        parts.append(f"sha256 of the weights: {_code(metadata['sha256'])}.")
    return "\n\n".join(parts)


def _limits(metadata: Mapping[str, Any], base: str) -> str:
    data = metadata.get("data") or {}
    lengths = data.get("max_tokens")
    lines = [
        f"- They belong to the weights of {_code(base)}: `retain.load_gates(folder, model)` refuses another "
        "model, by its fingerprint.",
        "- Overlap says how well the target is imitated, not how well the model answers afterwards: compare "
        "policies on your own tasks (`eval/`).",
        "- Text unlike the training documents can be scored worse than at random; fusing with an observed "
        "score helps where the question has been seen.",
    ]
    if lengths:
        lines.insert(
            1, f"- Trained on contexts of at most {lengths:,} tokens; beyond that nothing was measured."
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m retain.train.run.card", description="Write the training card of an artifact again."
    )
    parser.add_argument("folder", type=Path, help="of a finished run, for instance runs/gates-seed0")
    given = parser.parse_args(arguments)
    try:
        print(write_card(given.folder))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
