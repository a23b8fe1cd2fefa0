"""Writes the table of published models into docs/families.md, between its two marks.

python -m tests.published.table
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import transformers

from retain.eval.describe import TOKENS, ModelDescription, describe_model, size
from tests.published.model import Published, published

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- published: begin -->\n", "<!-- published: end -->\n"
# One precision for all, so that rows compare.
DTYPE = "bfloat16"
HEAD = (
    *("model", "type", "parameters", "evict", "left alone", "KV heads x width"),
    *(f"full, {tokens // 1024}K" for tokens in TOKENS),
    *(f"kept, {tokens // 1024}K" for tokens in TOKENS),
    *("alone, 128K", "gates", "status", "unverified"),
)


def describe_all(folder: Path) -> dict[str, tuple[Published, ModelDescription]]:
    """Every published model, described by a folder with nothing but its config."""
    return {
        own.model: (own, describe_model(str(own.save(folder)), TOKENS, policy="merge", dtype=DTYPE))
        for own in published()
    }


def table(described: Mapping[str, tuple[Published, ModelDescription]]) -> str:
    """The table, as Markdown."""
    rows = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join(["---"] * len(HEAD)) + " |"]
    for name, (own, found) in described.items():
        rows.append("| " + " | ".join(_cells(name, own, found)) + " |")
    return "\n".join(rows) + "\n"


def _cells(name: str, own: Published, found: ModelDescription) -> list[str]:
    unverified = ", ".join(f"`{key.removeprefix('text_config.')}`" for key in own.unverified)
    assert found.layout is not None, found.refusal
    specs = found.layout.evicting
    window = f", in a window of {specs[0].window:,}" if specs[0].window else ""
    alone = "; ".join(f"{len(layers)} {of.replace('_attention', '')}" for of, layers in found.alone.items())
    return [
        *(name, found.model_type, f"{found.parameters / 1e9:.3g} B"),
        *(f"{len(specs)}{window}", alone, f"{specs[0].num_kv_heads} x {specs[0].head_dim}"),
        *(size(footprint.full) for footprint in found.footprints),
        *(size(footprint.kept) for footprint in found.footprints),
        size(held) if (held := found.footprints[-1].alone) and alone else "",
        f"{found.gate_parameters / 1e6:.2f} M",
        "described" if found.whole is None else "described, text decoder",
        unverified,
    ]


def written(page: str, text: str) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} has lost its marks"
    return f"{before}{BEGIN}{text}{END}{after}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        found = describe_all(Path(folder))
    PAGE.write_text(written(PAGE.read_text(), table(found)))
