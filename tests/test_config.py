"""A YAML file becomes a dataclass, or one error that lists everything wrong with it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from retain.config import build, load, to_mapping
from tests.refused import refused


@dataclass(frozen=True)
class Guard:
    sinks: int = 4
    fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction must lie in [0, 1), got {self.fraction}")


@dataclass(frozen=True)
class Recipe:
    model: str
    seed: int
    rate: float = 1e-3
    kind: Literal["linear", "mlp"] = "linear"
    resume: bool = False
    output: Path = Path("runs/x")
    guard: Guard = Guard()
    ratios: tuple[float, ...] = (0.1, 0.2)
    betas: tuple[float, float] = (0.9, 0.99)
    limit: int | None = None
    extra_guard: Guard | None = None
    weights: dict[str, float] = field(default_factory=dict)
    guards: dict[str, Guard] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    size: int | str = 1


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ValueError) as caught:
        load(written(folder, text), Recipe, overrides)
    first, *rest = str(caught.value).splitlines()
    assert "recipe.yaml does not fit Recipe" in first
    assert first.endswith("1 problem" if len(rest) == 1 else f"{len(rest)} problems")
    return [line.removeprefix("  - ") for line in rest]


def test_every_annotation_is_understood(tmp_path: Path) -> None:
    text = """
model: a
seed: 1
rate: 2e-4
kind: mlp
resume: true
output: some/where
guard: {fraction: 0}
ratios: [1, 5e-1]
betas: [0.5, 0.6]
limit: 7
extra_guard: {sinks: 1}
weights: {a: 1, b: 2.5}
guards: {x: {sinks: 2}}
settings: {window: 32, pool: null}
size: big
"""
    recipe = load(written(tmp_path, text), Recipe)
    assert recipe == Recipe(
        "a",
        1,
        2e-4,
        "mlp",
        True,
        Path("some/where"),
        Guard(fraction=0.0),
        (1.0, 0.5),
        (0.5, 0.6),
        7,
        Guard(sinks=1),
        weights={"a": 1.0, "b": 2.5},
        guards={"x": Guard(sinks=2)},
        settings={"window": 32, "pool": None},
        size="big",
    )
    assert isinstance(recipe.guard.fraction, float)
    assert all(isinstance(ratio, float) for ratio in recipe.ratios)
    assert load(written(tmp_path, "model: 2024-12-24\nseed: 1\n"), Recipe).model == "2024-12-24"


def test_overrides_come_after_the_file_and_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "model: a\nseed: 1\nrate: 1\n")
    recipe = load(path, Recipe, ["seed=2", "seed=3", "ratios=[0.4]", "extra_guard.sinks=1", "limit=null"])
    assert (recipe.seed, recipe.ratios, recipe.extra_guard) == (3, (0.4,), Guard(sinks=1))
    assert recipe.rate == 1.0


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    text = """
modle: a
rate: fast
kind: mpl
resume: 1
guard: {sink: 4, fraction: 2e0}
ratios: 0.1
betas: [0.9]
limit: 1.5
extra_guard: {sinks: many}
weights: {a: no}
size: [1]
"""
    found = problems_of(tmp_path, text, "limt=3", "seed", "rate.deep=1")
    assert found == [
        "override 'seed': expected key=value, for example section.key=value",
        "override 'rate.deep=1': rate is 'fast' (str), not a section",
        "unknown key 'guard.sink' (did you mean 'sinks'?)",
        "unknown key 'modle' (did you mean 'model'?)",
        "unknown key 'limt' (did you mean 'limit'?)",
        "missing key 'model'",
        "missing key 'seed'",
        "rate: input should be a valid number, got 'fast' (str)",
        "kind: input should be 'linear' or 'mlp', got 'mpl' (str) (did you mean 'mlp'?)",
        "resume: input should be a valid boolean, got 1 (int)",
        "guard: fraction must lie in [0, 1), got 2.0",  # said by the section, without the key that it lacks
        "ratios: input should be a valid array, got 0.1 (float)",
        "missing key 'betas[1]'",
        "limit: input should be a valid integer, got 1.5 (float)",
        "extra_guard.sinks: input should be a valid integer, got 'many' (str)",
        "weights.a: input should be a valid number, got False (bool)"
        " (YAML reads yes, no, on, off as true or false: quote a word)",
        "size: input should be a valid integer, got [1] (list)",
        "size: input should be a valid string, got [1] (list)",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("seed: true", "seed: input should be a valid integer, got True (bool)"),
        ("model: null", "model: input should be a valid string, got None (NoneType)"),
        ("extra_guard: 3", "extra_guard: input should be an object, got 3 (int)"),
        ("extra_guard: {sinks: 1, fraction: 2}", "extra_guard: fraction must lie in [0, 1), got 2"),
    ],
)
def test_wrong_types_are_named(tmp_path: Path, line: str, problem: str) -> None:
    required = {"model": "model: a", "seed": "seed: 1"} | {line.split(":")[0]: line}
    (found,) = problems_of(tmp_path, "\n".join(required.values()))
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", r"must hold `key: value` lines at its top, got \[1, 2\] \(list\)"),
        ("model: [1\n", r"recipe\.yaml is not valid YAML"),
        ("seed: 1\nseed: 2\n", r"(?s)not valid YAML.*key 'seed' is given twice"),
        ("model: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("[a, b]: 1\n", r"(?s)not valid YAML: .*found unhashable key.*line 1"),
        ("seed: " + "[" * 5000 + "]" * 5000, "(?s)recipe.yaml is not valid YAML: .*recursion"),
        ("settings: &s\n  own: *s\n", "recipe.yaml is not valid YAML: found unconstructable recursive node"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    refused(message, load, written(tmp_path, text), Recipe)


def test_a_config_is_built_from_its_mapping() -> None:
    inner = {"extra_guard": Guard(1, 0.2), "guards": {"x": Guard(3)}, "weights": {"a": 1e29}}
    recipe = Recipe(model="ä: b", seed=1, rate=1e-7, limit=3, size="1", **inner)
    assert build(to_mapping(recipe), Recipe) == recipe


def test_a_path_that_is_no_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "pipe.yaml").touch()
    for path, said in {
        tmp_path: "is a folder",
        tmp_path / "piep.yaml": r"does not exist \(did you mean '.*pipe.yaml'",
        tmp_path / "nowhere" / "x.yaml": "does not exist: pass the path of a YAML file",
    }.items():
        with pytest.raises(FileNotFoundError, match=said):
            load(path, Recipe)
