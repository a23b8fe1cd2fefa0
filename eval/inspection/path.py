"""Describes the files at a path, in words and, where asked for, in one picture (`retain inspect`).

    retain inspect runs/gates-seed0
    retain inspect runs/gates-seed0 --model reference:0 --picture gates.png
    retain inspect results/demo --picture demo.png

A path is a folder with a gate artifact, a training run, one of its checkpoints, or results of a comparison;
or a file that `cache.save` wrote. The files that it must have show its kind, in the order of `KINDS`; the
error of a path of none of them names them all. Nothing is written but the picture.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from retain.budget.budget_table import BudgetTable
from retain.cache.file_format import FORMAT, read_file
from retain.cache.tier_file import CODED, TIERS, tiers_in
from retain.eval.diagnose.gate_cost import cost_of
from retain.eval.inspection.budget_picture import budget_map
from retain.eval.inspection.results import (
    ITEMS_FILES,
    Panels,
    describe_results,
    holds_results,
    listed,
    ranges,
    read_lines,
    read_mapping,
)
from retain.eval.report.plots import COLOURS, Dot, Heat, Lines, Look, Panel, Rows, Series, check_png, save_png
from retain.gates.artifact import METADATA_FILE, WEIGHTS_FILE, load_gates
from retain.process.command import command
from retain.process.extras import MissingExtra

# Raised by a file that is whole, but says other things than retain writes there.
UNFIT = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


@dataclass(frozen=True)
class Inspection:
    """Findings at a path: its kind in words, rows of (label, text), and title and rows of panels of its
    picture."""

    kind: str
    path: Path
    rows: tuple[tuple[str, str], ...]
    title: str
    panels: Panels

    def __str__(self) -> str:
        width = max((len(label) for label, _ in self.rows), default=0)
        lines = [f"  {label.ljust(width)}  {text}" for label, text in self.rows]
        return "\n".join([f"{self.kind}: {self.path}", *lines])

    def save_picture(self, path: Path) -> Path:
        """Draw into a PNG, in exactly that file.

        Raises:
            ValueError: a folder, or a name of another ending.
            MissingExtra: matplotlib is not installed.
        """
        try:
            panels = self.panels()
        except UNFIT as error:
            raise ValueError(
                f"{self.path} does not hold what a picture is made of ({type(error).__name__}: {error}): it "
                "is damaged."
            ) from error
        return save_png(panels, path, title=self.title)


def inspect_path(path: str | Path, model: str | None = None) -> Inspection:
    """Describe a folder or a file; `model` names the base model, to count gates' FLOPs against.

    Raises:
        FileNotFoundError: Nothing lies there.
        ValueError: Nothing that is known, or it is damaged.
    """
    path = Path(path)
    if not path.exists():
        near = sorted(other.name for other in path.parent.glob(f"{path.name[:3]}*"))[:5]
        hint = f" Beside it there are: {', '.join(near)}." if near else ""
        raise FileNotFoundError(f"{path} does not exist.{hint}")
    for kind, found, describe in KINDS.values():
        if found(path):
            try:
                rows, title, panels = describe(path, model)
            except UNFIT as error:
                if isinstance(error, MissingExtra) or str(path) in str(error):
                    raise
                raise ValueError(
                    f"{path} was taken for this, by its files: {kind}. It does not read as that "
                    f"({type(error).__name__}: {error}): it is damaged, or another program's."
                ) from error
            return Inspection(kind, path, tuple(rows), title, panels)
    wanted = "; ".join(f"{kind} ({sign})" for sign, (kind, _, _) in KINDS.items())
    every = sorted(path.iterdir()) if path.is_dir() else []
    inside = [each for each in every if any(found(each) for _, found, _ in KINDS.values())]
    hint = f" Inside of it there are: {', '.join(map(str, inside[:8]))}." if inside else ""
    raise ValueError(f"{path} holds nothing that retain wrote. Looked for: {wanted}.{hint}")


Words = list[tuple[str, str]]
Described = tuple[Words, str, Panels]


def _gates(path: Path, model: str | None) -> Described:
    """A gate artifact, loaded, so that what is damaged is not described."""
    gates = load_gates(path)
    known = gates.metadata
    dims: dict[str, list[int]] = {}
    for layer in gates.layers:
        shown = ", ".join(f"{name} {value}" for name, value in gates[layer].dims().items())
        dims.setdefault(shown, []).append(layer)
    parameters = sum(each.numel() for each in gates.parameters())
    size = (path / WEIGHTS_FILE).stat().st_size
    base = known.get("fingerprint") or {}
    revision = f" at revision {known['base_revision']}" if known.get("base_revision") else ""
    rows: Words = [
        ("family", f"{gates.family}: reads {known.get('input_point') or ', '.join(sorted(gates.inputs))}"),
        *(("layers", f"{len(own)} ({ranges(own)}), each {shown}") for shown, own in dims.items()),
        ("parameters", f"{parameters:,} ({size:,} bytes on disk), schema {known['schema_version']}"),
        ("says", f"{known['unit']}; as a score, {gates.unit}"),
        ("base model", f"{known.get('base_model') or 'not stated'}{revision}: {listed(base)}"),
        ("protected", f"trained for a window of {known.get('protected_window') or 0} last entries"),
        *((name, listed(known.get(name))) for name in ("target", "loss", "data")),
        ("calibration", _calibration(known.get("calibration"))),
        ("cost", str(cost_of(gates, known, model))),
    ]
    if gates.extension is not None:
        added = sum(each.numel() for each in gates.extension.parameters())
        rows.insert(3, ("adds", f"{added:,} of these parameters to the model, for a prefill"))
    held = (known.get("training") or {}).get("held_out")
    if held:
        rows.append(("held-out", f"at the end of {known['training'].get('steps')} steps: {listed(held)}"))
    curve = (known.get("calibration") or {}).get("curve")

    def panels() -> list[list[Panel]]:
        drawn: list[Panel] = [_weight_map(gates)]
        if (path / "log.jsonl").is_file():
            drawn.append(_loss_lines(path / "log.jsonl"))
        if curve:
            line = Series("keep_ratio", Look(0, 0), tuple(curve["threshold"]), tuple(curve["keep_ratio"]))
            log_x = min(curve["threshold"], default=0) > 0
            title = "keep_ratio that a threshold kept"
            drawn.append(Lines(title, "threshold on the score", "", (line,), log_x=log_x))
        return [drawn]

    return rows, f"{path.name}: {gates.family} gates of {known.get('base_model') or 'a model'}", panels


def _run(path: Path, model: str | None) -> Described:
    """A training run without an artifact yet."""
    config = read_mapping(path / "config.yaml")
    steps = (config.get("training") or {}).get("steps")
    log = _log(path / "log.jsonl")
    done = max((line["step"] for line in log), default=0)
    checkpoints = sorted(each.name for each in (path / "checkpoints").glob("step-*"))
    rows: Words = [
        ("state", f"not finished: step {done} of {steps} is logged; the same command resumes it"),
        ("checkpoints", ", ".join(checkpoints) or "none yet: it would begin anew"),
        ("base model", str(config.get("model"))),
        *((name, listed(config.get(name))) for name in ("gate", "target", "loss", "data")),
    ]
    if (path / "LOCK").exists():
        rows.insert(1, ("lock", "a process trains in it, or was killed while it did"))
    held = [line["held_out"] for line in log if line.get("held_out")]
    if held:
        rows.append(("held-out", listed(held[-1])))

    return rows, f"{path.name}: step {done} of {steps}", lambda: [[_loss_lines(path / "log.jsonl")]]


def _checkpoint(path: Path, model: str | None) -> Described:
    state, manifest = read_mapping(path / "state.json"), read_mapping(path / "manifest.json")
    try:
        with safe_open(path / WEIGHTS_FILE, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path / WEIGHTS_FILE} is missing, truncated or corrupt ({error}): make or fetch it again."
        ) from None
    torn = [
        name
        for name, recorded in manifest["files"].items()
        if not (path / name).is_file()
        or hashlib.sha256((path / name).read_bytes()).hexdigest() != recorded["sha256"]
    ]
    whole = f"no: {', '.join(torn)} differ from the manifest" if torn else ""
    rows: Words = [
        ("state", listed({name: value for name, value in state.items() if not isinstance(value, dict)})),
        ("tensors", f"{len(shapes)}, of {sum(map(math.prod, shapes.values())):,} numbers"),
        ("whole", whole or "yes, by the sha256 of its manifest"),
    ]

    def panels() -> list[list[Panel]]:
        sizes = [(name, math.prod(shapes[name])) for name in sorted(shapes)]
        dots = tuple(Dot(n, size, 0, size, name, COLOURS[0]) for n, (name, size) in enumerate(sizes))
        return [[Rows("what was saved", "numbers", tuple(enumerate(sorted(shapes))), dots)]]

    return rows, f"{path.parent.parent.name}, {path.name}", panels


def _saved_cache(path: Path, model: str | None) -> Described:
    """A conversation that `cache.save` wrote, read whole and checked."""
    header, tensors = read_file(path)
    rule, base = header["rule"], header["fingerprint"]
    seen_B = tensors["history.valid"].sum(-1).long()
    lengths: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".store." in name and name.endswith(".lengths"):  # of each tier
            layer, own = int(name.split(".")[1]), tensor.view(len(seen_B), -1).long()
            lengths[layer] = lengths.get(layer, 0) + own
    heads = max(own.shape[1] for own in lengths.values())
    padded = [torch.nn.functional.pad(own, (0, heads - own.shape[1])) for _, own in sorted(lengths.items())]
    table = BudgetTable(torch.stack(padded, dim=1), seen_B, rule["name"])
    held = sum(int(own.sum()) for own in lengths.values())
    seen = sum(int((seen_B[:, None] * own.shape[1]).sum()) for own in lengths.values())
    tiers = tiers_in(header, tensors)
    size, whole = sum(own.size for own in tiers.values()), sum(own.whole for own in tiers.values())
    on_disk, packed = path.stat().st_size, TIERS in header or CODED in header
    full = on_disk - size + whole
    beside = f"; {full:,} in full precision ({on_disk / full:.1%})" if packed else ""
    least, most = 100 * table.share_LH.min(), 100 * table.share_LH.max()
    budget = listed(rule.get("budget"), otherwise="none: everything is kept")
    rows: Words = [
        ("sequences", f"{len(seen_B)}, of {', '.join(map(str, seen_B.tolist()[:8]))} tokens seen"),
        ("entries", f"{held:,} held of {seen:,} seen ({held / max(1, seen):.1%}), {size:,} bytes"),
        ("by head", f"{least:.1f} % to {most:.1f} % of what was seen, over {len(lengths)} layers"),
        ("policy", f"{rule['name']}, budget {budget}"),
        ("regime", listed(header["regime"])),
        ("model", f"{listed(base)}, in {header['dtype']}"),
        ("gates", str(rule["gates"])[:16] if rule.get("gates") else "none"),
        ("file", f"{on_disk:,} bytes, sound by its sha256{beside}"),
    ]
    if packed:
        rows.insert(3, ("held in", "; ".join(f"{form}: {own}" for form, own in tiers.items())))
    if coded := header.get(CODED):
        errors = ", ".join(f"{coded[name]:.2%} of {name}" for name in ("keys", "values"))
        text = f"{errors} (relative root mean square), at most {coded['largest']:.3g}"
        rows.insert(4, ("error", f"of the {coded['bits']} bits in the file, decoded when loaded: {text}"))

    title = f"{path.name}: entries held by {rule['name']}, % of seen"
    return rows, "", lambda: [[budget_map(table, title)]]


def _results(path: Path, model: str | None) -> Described:
    rows, panels = describe_results(path)
    return rows, path.name, panels


def _is_cache(path: Path) -> bool:
    """Whether `cache.save` wrote it; a file that cannot be opened is said to be cut when it is read."""
    if not path.is_file() or path.suffix != ".safetensors":
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return FORMAT in (file.metadata() or {})
    except SafetensorError:
        return True


def _holds(*names: str) -> Callable[[Path], bool]:
    """Whether a folder has these files."""
    return lambda path: all((path / name).is_file() for name in names)


# Files that show a kind -> its name, whether it is there, and the function that describes it.
KINDS: dict[str, tuple[str, Callable[[Path], bool], Callable[[Path, str | None], Described]]] = {
    METADATA_FILE: ("gate artifact", _holds(METADATA_FILE), _gates),
    "state.json, manifest.json": (
        *("checkpoint of a training run", _holds("state.json", "manifest.json"), _checkpoint),
    ),
    "run.json, config.yaml": ("training run", _holds("run.json", "config.yaml"), _run),
    f"manifest.json of one, or {' or '.join(ITEMS_FILES)}": (
        *("results of a comparison", holds_results, _results),
    ),
    "a .safetensors file of cache.save": ("saved cache", _is_cache, _saved_cache),
}


def _weight_map(gates: Any) -> Heat:
    """Root mean square of each tensor in each layer: dead and blown-up layers show."""
    sizes = [
        {
            n: max(1e-6, float(p.square().mean().sqrt()))
            for n, p in gates[layer].named_parameters()
            if p.numel()
        }
        for layer in gates.layers
    ]
    names = sorted({name for own in sizes for name in own})
    grid = [[own.get(name, math.nan) for own in sizes] for name in names]
    title = "weights, root mean square" if names else "these gates have no weights of their own"
    return Heat(title, "layer", "", grid, tuple(map(str, gates.layers)), tuple(names), log=True)


def _loss_lines(path: Path) -> Lines:
    """Loss by step, of training and of held-out documents."""
    lines = _log(path)
    drawn = {
        "training": [(line["step"], line["loss"]) for line in lines if "loss" in line],
        "held-out": [(line["step"], line["held_out"].get("loss")) for line in lines if line.get("held_out")],
    }
    series = (
        Series(name, Look(place, place, marker=place), *zip(*points, strict=True))
        for place, (name, points) in enumerate(drawn.items())
        if points and all(loss is not None for _, loss in points)
    )
    return Lines("loss", "step", "", tuple(series))


def _log(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a log; a line that a kill cut is left out."""
    return read_lines(path, needed=("step",)) if path.is_file() else []


def _calibration(stored: Any) -> str:
    """Parts of a calibration, without their tables."""
    stored = stored or {}
    parts = [f"{name} {own}" for name, own in stored.items() if isinstance(own, str | int | float | bool)]
    if stored.get("layers"):
        kinds = sorted({str(own.get("kind", "a curve")) for own in stored["layers"].values()})
        parts.append(f"{len(stored['layers'])} layers remapped ({', '.join(kinds)})")
    for name, of in (("curve", "thresholds"), ("quotas", "quotas")):
        if ratios := (stored.get(name) or {}).get("keep_ratio"):
            parts.append(f"{of} for keep_ratios {ratios[0]:g} to {ratios[-1]:g}")
    if stored.get("fusion"):
        parts.append(f"weights for fusion {', '.join(stored['fusion'])}")
    if limit := (stored.get("capacity") or {}).get("limit"):
        parts.append(f"warns where a risk above {limit:.4g} would go")
    return "; ".join(parts) or "none"


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(prog="retain inspect", description="Say what lies at a path.")
    parser.add_argument("path", help="gate artifact, training run, checkpoint, results, or saved cache")
    parser.add_argument("--model", help="base model of gates, to count their FLOPs against its prefill's")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw it too")
    given = parser.parse_args(arguments)
    if given.picture is not None:
        check_png(given.picture)
    found = inspect_path(given.path, given.model)
    print(found)
    if given.picture is not None:
        print(f"  picture: {found.save_picture(given.picture)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
