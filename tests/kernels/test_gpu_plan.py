"""Checks for a GPU: commands are such as their tools take; a run is limited, recorded and resumable."""

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from retain.kernels import gpu
from retain.kernels.gpu import Run, main
from retain.kernels.gpu_plan import OPS, STEPS, Step
from retain.process.benchmark import Benchmark
from tests.launch import ROOT

# Where a tool's work begins, once it has read what it was given.
WORK = {
    **{"kernels.bench": "benchmark", "train.speed": "record", "eval.speed.__main__": "record"},
    **{"kernels.build": "compile_all", "kernels.gpu": "look", "train.distill": "distill make_accelerator"},
    **{"reference.train": "make", "reference.evaluate": "load_folder"},
}
# One of those that differ in the op alone.
TOOLS = [
    (step, dry)
    for step in STEPS
    for dry in (False, True)
    if "-m pytest" not in step.command and not step.name.endswith(OPS[1:]) and (step.tiny or not dry)
]


class Reached(BaseException):
    """The work of a tool would begin."""


@pytest.mark.parametrize(("step", "dry"), TOOLS, ids=[f"{step.name}{' dry' * dry}" for step, dry in TOOLS])
def test_every_command_is_one_that_its_tool_takes(
    step: Step, dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not dry)
    monkeypatch.chdir(ROOT)
    command = Run(tmp_path, dry=dry).command(step)
    module, *arguments = command[command.index("-m") + 1 :]

    def reached(*_: Any, **__: Any) -> None:
        raise Reached

    place = module + ".__main__" * (module == "retain.eval.speed")
    tool = importlib.import_module(place)
    for name in WORK[place.removeprefix("retain.")].split():
        monkeypatch.setattr(Benchmark if name == "record" else tool, name, reached)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(Reached):
        tool.main()


def test_each_op_and_each_test_for_a_gpu_has_its_step(tmp_path: Path) -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names) and names[0] == "environment"
    assert {f"{what}-{op}" for what in ("ops", "bench") for op in OPS} <= set(names)
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if "@pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    run = Run(tmp_path)
    asked = [word for step in STEPS for word in run.command(step) if word.startswith("tests/")]
    assert sorted(asked) == sorted(marked), "each in one step, once"


BLOCKED = (
    *("beartype", "datasets", "deepspeed", "hypothesis", "matplotlib"),
    *("scipy", "sklearn", "statsmodels", "wandb"),
)
BLOCK = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {BLOCKED} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path if "editable" not in repr(finder).lower()]
"""


def test_a_dry_run_does_what_a_cpu_can_with_the_packages_of_a_machine_for_gpus(tmp_path: Path) -> None:
    """Nothing of ours is installed there, nor several packages of others; and there is no device here."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    out, wanted = tmp_path / "out", ("ops-compact", "train-32k", "bench-compact", "peers")
    command = [sys.executable, "-m", "retain.kernels.gpu", "--dry-run", "--out", str(out), "--only", *wanted]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {name: json.loads((out / f"{name}.json").read_text()) for name in ("environment", *wanted)}
    status = {name: (record["status"], record["reason"]) for name, record in records.items()}
    without = ("skipped", "no CUDA device: a dry run uses none")
    assert status == {
        **dict.fromkeys(("environment", "ops-compact", "train-32k"), ("passed", "")),
        **dict.fromkeys(("bench-compact", "peers"), without),
    }
    assert {"beartype", "hypothesis"} <= set(records["environment"]["figures"]["absent"])
    assert (
        "path: compact runs as reference: the tensors are not on CUDA" in records["ops-compact"]["verdicts"]
    )
    (verdict,) = records["train-32k"]["verdicts"]
    assert "a step as fast as planned: " in verdict
    for record in records.values():
        assert (
            record["dry_run"] and record["versions"]["torch"] == records["environment"]["versions"]["torch"]
        )
        assert record["commit"] and record["device"] in ("torch sees no CUDA device", None)
    text = (out / "summary.md").read_text()
    assert "**Dry run**" in text and f"- {verdict}" in text
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[2:] == ["environment", *wanted]


def python(name: str, code: str, seconds: int = 20, **more: Any) -> Step:
    """A step that runs some code, on no GPU."""
    return Step(name, name, seconds, f"{{python}} -c {shlex.quote(code)}", gpu=False, **more)


FIRST = Step(
    "environment",
    "first",
    20,
    "{python} -c "
    + shlex.quote(
        'import json, sys; json.dump({"device": None, "no_device": "none here"}, open(sys.argv[1], "w"))'
    )
    + " {record}",
)
# Leaves a child that ignores being asked to end, and waits for ever.
HANGS = """
import subprocess, sys, time
own = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", own], stdout=subprocess.PIPE)
child.stdout.readline()
print("child", child.pid, flush=True)
time.sleep(60)
"""


def statuses(out: Path) -> dict[str, str]:
    return {
        record["step"]: record["status"]
        for record in map(json.loads, (path.read_text() for path in out.glob("*.json")))
    }


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_step_that_hangs_is_ended_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "print('- held: this'); print('50 %\\\\r100 %'); print('**NOT held**: that')"
    steps = (
        FIRST,
        python("hangs", HANGS, 1),
        python("fails", "import sys; print('why'); sys.exit(3)"),
        python("passes", said.replace("\\\\", "\\")),
        Step("needs-gpu", "", 20, "false"),
        python("needs-module", "", needs=("no_such_module",)),
        python("needs-step", "", after="fails"),
    )
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "GRACE", 0.3)
    assert main(["--out", str(tmp_path)]) == 1
    assert statuses(tmp_path) == {
        **{"environment": "passed", "hangs": "timeout", "fails": "failed", "passes": "passed"},
        **dict.fromkeys(("needs-gpu", "needs-module", "needs-step"), "skipped"),
    }
    record = {step.name: json.loads((tmp_path / f"{step.name}.json").read_text()) for step in steps}
    assert record["hangs"]["reason"] == "it took longer than 1 s and was ended"
    assert not alive(int(record["hangs"]["tail"].split()[-1])), "its child outlived it"
    assert record["fails"]["exit"] == 3 and record["fails"]["tail"] == "why\n"
    assert record["passes"]["verdicts"] == ["held: this", "**NOT held**: that"]
    assert record["passes"]["tail"] == "- held: this\n100 %\n**NOT held**: that\n"
    assert record["needs-gpu"]["reason"] == "no CUDA device: none here"
    assert record["needs-module"]["reason"] == "not installed: no_such_module"
    assert record["needs-step"]["reason"] == "fails has not passed"
    shown = capsys.readouterr().out
    assert "not passed: hangs fails (once mended: --redo hangs fails)" in shown
    text = (tmp_path / "summary.md").read_text()
    assert "| fails | failed: exit status 3 |" in text and "```\nwhy\n```" in text and "- held: this" in text


def test_a_second_call_goes_on_with_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write(%r); print('ran')"
    last = f"import os, time; {note % 'c'}; time.sleep(0 if os.path.exists({str(tmp_path / 'go')!r}) else 30)"
    steps = (
        FIRST,
        python("one", note % "a"),
        python("two", f"{note % 'b'}; raise SystemExit(1)"),
        python("long", last, 1, goes_on=True),
        python("late", note % "d"),
    )
    monkeypatch.setattr(gpu, "STEPS", steps)
    out = ["--out", str(tmp_path / "out")]
    assert main([*out, "--only", "one", "t*", "--minutes", "10"]) == 1 and log.read_text() == "ab"
    # What failed is done, and stays a failure; a step that only ran out of time is not, and is none.
    assert main([*out, "--only", "one", "two", "long"]) == 1 and log.read_text() == "abc"
    assert statuses(tmp_path / "out")["long"] == "cut"
    (tmp_path / "go").touch()
    assert main(out) == 1 and log.read_text() == "abccd"
    assert main([*out, "--redo", "two", "--only", "one"]) == 1 and log.read_text() == "abccdb"
    capsys.readouterr()
    assert main([*out, "--list"]) == 0 and log.read_text() == "abccdb"
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert shown[1:] == [["one", "passed"], ["two", "failed"], ["long", "passed"], ["late", "passed"]]
    # Another command is another step; a torn record is none.
    monkeypatch.setattr(gpu, "STEPS", (*steps[:1], python("one", note % "A"), *steps[2:]))
    (tmp_path / "out" / "late.json").write_text("{")
    assert main(out) == 1 and log.read_text() == "abccdbAd"


def test_when_the_minutes_are_over_no_step_begins_and_the_last_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (FIRST, python("sleeps", "import time; time.sleep(30)"), python("never", ""))
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert main(["--out", str(tmp_path), "--minutes", "0.02"]) == 0
    assert statuses(tmp_path) == {"environment": "passed", "sleeps": "cut"}
    assert "the minutes are over" in capsys.readouterr().out


def test_a_run_that_is_stopped_ends_its_step_and_says_so(tmp_path: Path) -> None:
    code = (
        "from retain.kernels import gpu\nfrom retain.kernels.gpu_plan import Step\n"
        f"gpu.STEPS, gpu.GRACE = ({FIRST}, {python('hangs', HANGS)}), 0.3\n"
        f"raise SystemExit(gpu.main(['--out', {str(tmp_path)!r}]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=subprocess.PIPE
    )
    log, end = tmp_path / "hangs.log", time.monotonic() + 60
    while not (log.exists() and "child" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and b"the same command goes on" in error
    assert not alive(int(log.read_text().split()[-1]))
    assert statuses(tmp_path)["hangs"] == "cut"
    assert "| hangs | cut" in (tmp_path / "summary.md").read_text()


def test_a_missing_package_is_named_and_nothing_else_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_module"))
    assert gpu.look(tmp_path / "record.json") == 1
    assert "WRONG: every step needs no_such_module, and this interpreter" in capsys.readouterr().out
    steps = (python("environment", "raise SystemExit(1)"), python("one", ""))
    monkeypatch.setattr(gpu, "STEPS", steps)
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert statuses(tmp_path / "out") == {"environment": "failed", "one": "skipped"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "op-compact"], "--only 'op-compact' is no step; there are environment, ops-"),
        (["--minutes", "0"], "--minutes is above 0, got 0.0"),
    ],
)
def test_errors_come_before_work(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "out").exists()
