"""Defines the command line of `retain train` and `train/distill.py`, without importing what a run needs."""

import argparse
import json
from pathlib import Path
from typing import Any

from retain.config import key_help

# The recipe of a run without a YAML; in a wheel the recipes lie in the package.
_PACKAGED = Path(__file__).resolve().parent.parent / "recipes"
RECIPES = _PACKAGED if _PACKAGED.is_dir() else _PACKAGED.parent / "configs" / "distill"
RECIPE = RECIPES / "laptop.yaml"


class _Help(argparse.Action):
    """Prints the usage, and every key of the config with its type, default and meaning."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from retain.train.recipe import DistillConfig  # takes seconds

        print(f"{parser.format_help()}\nkeys (type; default): meaning")
        for line in key_help(DistillConfig):
            print(f"  {line}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Takes options anywhere between MODEL, DATA and `key=value`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


def distill_parser() -> argparse.ArgumentParser:
    """Returns the parser; `recipe_of` reads what it parsed."""
    parser = _Parser(
        description="Train retention gates by distillation.",
        usage="retain train MODEL DATA [--dry-run] [key=value ...]\n"
        "       accelerate launch train/distill.py --config YAML [--dry-run] [key=value ...]",
        add_help=False,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL DATA, key=value",
        help="a hub name or a folder; documents: files of jsonl, a hub data set or a folder of one, "
        "or `reference` (generated); and changes, for instance training.steps=100",
    )
    parser.add_argument("--config", metavar="YAML", help="for instance configs/distill/reference.yaml")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make one step on the longest documents, say what it took, and stop",
    )
    parser.add_argument("-h", "--help", nargs=0, action=_Help, help="print this, and every key")
    return parser


def recipe_of(parsed: argparse.Namespace) -> tuple[Path | None, list[str]]:
    """Returns the YAML of a request (None: defaults alone) and its `key=value` changes, in order.

    Raises:
        ValueError: neither a YAML nor MODEL and DATA, or more than these; documents of an unknown kind.
    """
    named = [word for word in parsed.words if "=" not in word]
    changes = [word for word in parsed.words if "=" in word]
    if len(named) != (0 if parsed.config else 2):
        raise ValueError(
            f"wanted --config YAML, or MODEL and DATA; got {' '.join(parsed.words) or 'neither'}. "
            "Changes are key=value; --help lists every key."
        )
    if parsed.config:
        return Path(parsed.config), changes
    model, data = named
    name = Path(model).name.replace(":", "-").lower()
    about = [f"model={json.dumps(model)}", f"output={json.dumps(f'runs/{name}')}"]
    if data == "reference":
        return None, [*about, *changes]
    kind = kind_of(data)
    about += [f"data.source={kind}", f"data.path={json.dumps(data)}", "data.subset=null"]
    about += ["data.streaming=false"] if kind == "jsonl" else []
    return RECIPE, [*about, *changes]


def kind_of(data: str) -> str:
    """Returns `jsonl` for a file, a pattern or a folder of these, else `hub`. ValueError: another file, or a
    folder of jsonl and parquet."""
    place = Path(data)
    names = [path.name for path in place.rglob("*")] if place.is_dir() else [data]
    jsonl, parquet = (any(name.lower().endswith(end) for name in names) for end in (".jsonl", ".parquet"))
    if (jsonl and parquet) or (place.is_file() and not jsonl):
        raise ValueError(f"{data}: name a file or pattern of .jsonl, or a folder of one kind of files.")
    return "jsonl" if jsonl else "hub"
