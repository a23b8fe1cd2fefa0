"""The legend covers every axis that an annotation of the project names."""

import ast
import re
from pathlib import Path

import pytest

from retain.shapes import LEGEND

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"Bool", "Float", "Float32", "Float64", "Int", "Int32", "Int64", "Num", "Real", "Shaped", "Integer"}


def axes(annotation: str) -> set[str]:
    """The letters of `"B H R1 rows"`, where `R1` is R + 1; lower-case words are local and name no axis."""
    return {re.sub(r"(?<=[A-Z])\d+$", "", axis) for axis in re.findall(r"\b[A-Z]\w*", annotation)}


def test_the_legend_holds_one_letter_an_axis() -> None:
    assert all(len(letter) == 1 and letter.isupper() for letter in LEGEND)
    with pytest.raises(TypeError):
        LEGEND["X"] = "anything"  # type: ignore[index]


@pytest.mark.parametrize("folder", ["retain", "kernels", "train", "eval"])
def test_annotations_use_letters_of_the_legend(folder: str) -> None:
    strangers = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name | ast.Attribute)):
                continue
            name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if name not in DTYPES or not isinstance(node.slice, ast.Tuple) or len(node.slice.elts) != 2:
                continue
            shape = node.slice.elts[1]
            if isinstance(shape, ast.Constant) and isinstance(shape.value, str):
                unknown = axes(shape.value) - set(LEGEND)
                if unknown:
                    strangers.append(f"{path.relative_to(ROOT)} line {node.lineno}: {sorted(unknown)}")
    assert strangers == [], "\n".join(strangers)
