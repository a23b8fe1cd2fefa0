"""What `make gpu` does with its steps: time limits, failures, going on, wheels that travel along."""

import sys
import zipfile
from pathlib import Path

import pytest

from retain.kernels import gpu


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, tuple[float, str]]:
    """Steps of a second each on a machine that says it has a device."""
    made = {
        "good": (60, f"{{python}} -c \"print('12 passed'); open('{tmp_path}/ran', 'a').write('x')\""),
        "bad": (60, "{python} -c \"print('1 failed'); raise SystemExit(3)\""),
        "endless": (1, '{python} -c "import time; time.sleep(60)"'),
    }
    monkeypatch.setattr(gpu, "STEPS", made)
    monkeypatch.setattr(gpu, "LOOK", "print('a device')")
    return made


def test_a_failure_stops_no_other_and_the_same_command_goes_on(steps, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert gpu.main(["--out", str(out)]) == 1
    summary = (out / "summary.md").read_text()
    rows = {line.split(" | ")[0][2:]: line for line in summary.splitlines() if line.startswith("| ")}
    assert "passed (" in rows["good"] and rows["good"].endswith("| 12 passed |")
    assert "failed, exit status 3" in rows["bad"] and "ended after 1 s" in rows["endless"]
    assert "a device" in summary and "bad: failed" in capsys.readouterr().out
    steps["bad"] = steps["endless"] = (60, '{python} -c "print(1)"')
    assert gpu.main(["--out", str(out)]) == 0
    assert (tmp_path / "ran").read_text() == "x"  # not again
    assert gpu.main(["--out", str(tmp_path / "late"), "--minutes", "0"]) == 1
    assert "not begun: no time left" in (tmp_path / "late/summary.md").read_text()


def test_without_a_device_nothing_is_tried(steps, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu, "LOOK", "print('no CUDA device'); raise SystemExit(1)")
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().out and not (tmp_path / "summary.md").exists()


def test_wheels_travel_along(steps, tmp_path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "lacking-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking.py", "ANSWER = 42\n")
    steps["good"] = (60, '{python} -c "import lacking; assert lacking.ANSWER == 42"')
    assert gpu.main(["--out", str(tmp_path), "--only", "go*", "--wheels", str(wheels)]) == 0


def test_the_plan_names_every_op_and_commands_that_there_are(capsys) -> None:
    assert gpu.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"--check --device cuda --op {op}" in listed for op in gpu.OPS)
    folders = {path.parent.name for path in (gpu.ROOT / "kernels").glob("*/cases.py")}
    assert folders == {*gpu.OPS}
    assert all((gpu.ROOT / name).is_file() for name in gpu.gpu_tests()) and gpu.gpu_tests()
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
    from retain.eval import speed

    for _, text in gpu.STEPS.values():
        words = text.format(python=sys.executable, out="out", tests="").split()
        if "retain.eval.speed" in words:
            given = vars(speed.parser().parse_args(words[3:]))
            assert given["device"] == "cuda" and given["gates"] == "random"
