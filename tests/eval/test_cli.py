"""The command `retain`: commands are found, misspelt ones are named, and help needs no extra."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retain.eval import cli

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown and line in shown for name, (line, _) in cli.COMMANDS.items())
    assert cli.main([]) == 2


def test_help_imports_neither_torch_nor_an_extra() -> None:
    code = (
        "import sys, retain.eval.cli as cli; cli.main(['--help']); "
        "heavy = {'torch', 'transformers', 'lm_eval', 'matplotlib', 'scipy', 'datasets'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_ends_the_command_without_a_word() -> None:
    """As `retain --help | head -1`: what is printed afterwards has no reader."""
    code = "import sys, retain.eval.cli as cli; sys.exit(cli.main(sys.argv[1:]))"
    for typed in ["--help"], ["policies"], ["inspect", "--help"]:
        command = [sys.executable, "-c", code, *typed]
        # Buffered, as for users: argparse itself swallows what an unbuffered write says.
        where = {"env": {**os.environ, "PYTHONUNBUFFERED": ""}, "cwd": ROOT}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **where) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b"" and process.wait() == 141, typed


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            PermissionError(13, "Permission denied", "x.md"),
            2,
            "error: [Errno 13] Permission denied: 'x.md'\n",
        ),
        (ValueError("no such run"), 2, "error: no such run\n"),
    ],
)
def test_what_ends_a_command_early_is_one_line(
    raised: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    class Module:
        @staticmethod
        def main(arguments: list[str]) -> int:
            raise raised

    monkeypatch.setattr(cli, "import_module", lambda name: Module)
    assert cli.main(["compare"]) == status
    assert capsys.readouterr().err == said


def test_an_unknown_command_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspct"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "did you mean 'inspect'" in captured.err
    assert captured.err.count("\n") == 1


def test_policies_lists_presets_with_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    from retain.presets import policies

    assert cli.main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *(preset.name for preset in policies())]
    (fused,) = [line for line in lines if line.startswith("fused ")]
    assert "gates" in fused
    assert cli.main(["policies", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: retain policies")
    assert cli.main(["policies", "fused"]) == 2
    assert "takes no arguments" in capsys.readouterr().err


def test_compare_is_the_entry_of_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--config", "no/such.yaml"]) == 2
    assert "no/such.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["study", "--config", "no/such.yaml"], "no/such.yaml"),
        (["fused-claims", "no/such/run"], "is no run of eval/compare.py"),
        (["capacity", "--gates", "no/such/gates", "--output", "no/such/output"], "no/such/gates"),
    ],
)
def test_every_command_is_the_entry_of_its_module(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(typed) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""


def test_a_command_that_says_nothing_went_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """`capacity_study.main` returns None; a status goes through as it is."""
    given, said = [], [None, 0, 1, 2]

    class Module:
        @staticmethod
        def main(arguments: list[str]) -> int | None:
            given.append(arguments)
            return said[len(given) - 1]

    monkeypatch.setattr(cli, "import_module", lambda name: Module)
    assert [cli.main(["capacity", "--seed", "1"]) for _ in said] == [0, 0, 1, 2]
    assert given == [["--seed", "1"]] * 4


def test_lm_eval_without_it_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["lm-eval", "--", "--tasks", "ruler"]) == 2
    assert "pip install 'retain[lm-eval]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ("-- --tasks ruler", "--model retain --tasks ruler"),
        ("--tasks ruler", "--model retain --tasks ruler"),
        ("-- run --tasks ruler", "run --model retain --tasks ruler"),
        ("-- --model hf --tasks ruler", "--model hf --tasks ruler"),
        ("-- --model=hf --tasks ruler", "--model=hf --tasks ruler"),
        ("-- -M hf --tasks ruler", "-M hf --tasks ruler"),
        ("-- --config run.yaml", "--config run.yaml"),
        ("-- ls tasks", "ls tasks"),
    ],
)
def test_lm_eval_is_asked_for_our_class_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, typed: str, passed: str
) -> None:
    """Its own default is the full cache, which nobody means who types `retain lm-eval`."""
    seen = []

    class Main:
        @staticmethod
        def cli_evaluate() -> None:
            seen.append(sys.argv)

    monkeypatch.setattr(cli, "require", lambda *names, what: None)
    monkeypatch.setattr(cli, "import_module", lambda name: Main)
    before = sys.argv
    assert cli.main(["lm-eval", *typed.split()]) == 0
    assert seen == [["lm-eval", *passed.split()]] and sys.argv is before
