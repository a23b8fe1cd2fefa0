"""The command `retain`: commands are found, misspelt ones are named, and help needs no extra."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from retain.eval import cli
from retain.presets import policies

ROOT = Path(__file__).resolve().parents[2]


def module_of(monkeypatch, main):
    """Every command's module is one with this `main`."""
    stub = SimpleNamespace(main=main, cli_evaluate=main, lm_eval=cli.lm_eval)
    monkeypatch.setattr(cli, "import_module", lambda name: stub)


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown and line in shown for name, (line, _) in cli.COMMANDS.items())
    assert cli.main([]) == 2


def test_help_imports_neither_torch_nor_an_extra():
    code = (
        "import sys, retain.eval.cli as cli; cli.main(['--help']); "
        "heavy = {'torch', 'transformers', 'lm_eval', 'matplotlib', 'scipy', 'datasets'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_ends_the_command_without_a_word():
    code = "import sys, retain.eval.cli as cli; sys.exit(cli.main(sys.argv[1:]))"
    # Buffered, as for users: argparse itself swallows what an unbuffered write says.
    where = {"env": {**os.environ, "PYTHONUNBUFFERED": ""}, "cwd": ROOT}
    for typed in ["--help"], ["policies"], ["describe", "--help"]:
        command = [sys.executable, "-c", code, *typed]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **where) as process:
            process.stdout.close()
            assert process.stderr.read() == b"" and process.wait() == 141, typed


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (PermissionError(13, "Denied", "x.md"), 2, "error: [Errno 13] Denied: 'x.md'\n"),
        (ValueError("no such run"), 2, "error: no such run\n"),
    ],
)
def test_what_ends_a_command_early_is_one_line(raised, status, said, monkeypatch, capsys):
    def fail(arguments):
        raise raised

    module_of(monkeypatch, fail)
    assert cli.main(["describe"]) == status
    assert capsys.readouterr().err == said


def test_policies_lists_presets_with_what_they_need(capsys):
    assert cli.main(["policies"]) == 0
    shown = capsys.readouterr().out
    table, legend = shown.split("\n\n")
    lines = table.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *(preset.name for preset in policies())]
    assert all(f"\n{column}: " in f"\n{legend}" for column in lines[0].split()[1:])
    assert max(map(len, shown.splitlines())) <= 110
    (learned,) = [line for line in lines if line.startswith("learned ")]
    assert "gates" in learned


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["describ"], "did you mean 'describe'"),
        (["compare", "--config", "no/such.yaml"], "no/such.yaml"),
        (["describe", "no/such/model"], "no/such/model"),
    ],
)
def test_a_wrong_request_is_one_line(typed, said, capsys):
    assert cli.main(typed) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and captured.err.startswith("error: ")


@pytest.mark.parametrize("typed", ["-- run --tasks ruler", "run --tasks ruler"])
def test_lm_eval_gets_what_was_typed(monkeypatch, typed):
    seen = []
    monkeypatch.setattr(cli, "require", lambda *names, what: None)
    module_of(monkeypatch, lambda: seen.append(sys.argv))
    before = sys.argv
    assert cli.main(["lm-eval", *typed.split()]) == 0
    assert seen == [["lm-eval", "run", "--tasks", "ruler"]] and sys.argv is before
