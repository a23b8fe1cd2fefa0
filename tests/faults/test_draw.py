"""Tests that draws are reproducible, stratified and of faults that are run."""

from pathlib import Path

import pytest

from tests.faults.draw import SEED, code_lines, draw, meaning, read_faults, rooms, shares, write_faults
from tests.faults.toy import make_toy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("toy"))


def test_the_seed_is_the_committed_one() -> None:
    assert SEED == 20261123


def test_a_draw_depends_on_seed_and_tree_alone(toy: Path, tmp_path: Path) -> None:
    first = draw(toy, count=6)
    assert draw(make_toy(tmp_path / "elsewhere"), count=6) == first
    assert draw(toy, count=6, seed=1) != first
    write_faults(tmp_path / "drawn.jsonl", first)
    assert read_faults(tmp_path / "drawn.jsonl") == first


def test_a_draw_is_stratified_and_of_single_lines_that_are_run(toy: Path) -> None:
    drawn = [fault for seed in range(6) for fault in draw(toy, count=6, seed=seed)]
    lines = {
        room: sum(len(code_lines((toy / f).read_text())) for f in files) for room, files in rooms(toy).items()
    }
    wanted = shares(lines, 6)
    assert min(wanted.values()) >= 1
    assert {room: sum(fault.room == room for fault in drawn) for room in wanted} == {
        room: 6 * count for room, count in wanted.items()
    }
    for fault in drawn:
        source = (toy / fault.file).read_text()
        changed = source.split("\n")
        assert changed[fault.line - 1] == fault.before
        changed[fault.line - 1] = fault.after
        assert meaning("\n".join(changed)) != meaning(source), fault
    text = (toy / "retain/__init__.py").read_text().split("\n")
    numbers = {
        number for number, line in enumerate(text, 1) if "1 + " in line or "LIMIT" in line or '"""' in line
    }
    assert len(numbers) == 5
    assert numbers.isdisjoint(fault.line for fault in drawn if fault.room == "retain")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""One."""\nx = 1', '"""Two."""\nx = 1'),
        ("def f(x: 1 + 1) -> 2: pass", "def f(x: 1 - 1) -> 3: pass"),
        ("x: list[1] = 2", "x: list[2] = 2"),
        ("if TYPE_CHECKING:\n    x = 1", "if TYPE_CHECKING:\n    x = 2"),
        ("if __name__ == '__main__':\n    f(1)", "if __name__ == '__main__':\n    f(2)"),
    ],
)
def test_what_is_not_run_has_no_meaning(before: str, after: str) -> None:
    assert meaning(before) == meaning(after)
    assert meaning(before + "\ny = 1") != meaning(after + "\ny = 2")


def test_shares_are_proportional_and_at_least_one() -> None:
    assert shares({"a": 700, "b": 290, "c": 9, "d": 1}, 40) == {"a": 27, "b": 11, "c": 1, "d": 1}
    assert sum(shares({str(n): n + 1 for n in range(30)}, 40).values()) == 40
    with pytest.raises(ValueError, match="draw at least 3"):
        shares({"a": 1, "b": 1, "c": 1}, 2)


def test_the_rooms_of_this_tree_are_its_packages() -> None:
    found = rooms(ROOT)
    assert {"retain", "retain.eval", "retain.train", "retain.kernels"} <= found.keys()
    assert all((ROOT / file).is_file() for files in found.values() for file in files)
    assert len(found) <= 40
