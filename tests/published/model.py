"""Reads the published configs, and describes each without weights.

A file of `configs/` holds one family. Each model has its config without what shapes no cache, where that was
read (`sources`), keys that no source gives (`unverified`), and where sources differ (`note`).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class Published:
    """One model: its hub name, its config, and where that was read."""

    model: str
    config: dict[str, Any]
    sources: tuple[str, ...]
    unverified: tuple[str, ...] = ()
    note: str = ""

    def save(self, folder: Path) -> Path:
        """Write the config.json of a folder of its own, and return the folder."""
        own = folder / self.model.replace("/", "--")
        own.mkdir(parents=True)
        (own / "config.json").write_text(json.dumps(self.config))
        return own


def published() -> Iterator[Published]:
    """All models, family by family."""
    for path in sorted(CONFIGS.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text()):
            lists = {name: tuple(entry.pop(name, ())) for name in ("sources", "unverified")}
            yield Published(**entry, **lists)
