"""The command `retain`: finds the command that is typed first, and calls it.

The exit status is the command's; 2, with one line on stderr, if something that the user typed is wrong. A
command is a row of `COMMANDS`, and its module is imported only when it is called, so that `retain --help`
needs none of the extras.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import retain
from retain.process.command import command
from retain.process.extras import require
from retain.process.registry import lookup

__all__ = ["COMMANDS", "main"]

# name -> meaning, in a line; `module:function` that it calls with the arguments behind it.
COMMANDS: dict[str, tuple[str, str]] = {
    "policies": ("list the policies that ship, and what each needs", "retain.eval.cli:list_policies"),
    "doctor": ("report versions, devices and kernels", "retain.eval.describe:doctor"),
    "describe": (
        "say what a model would evict and keep, from its config alone",
        "retain.eval.describe:main",
    ),
    "try": ("answer one question from a full cache and from a tenth of it", "retain.eval.tryout:main"),
    "compare": ("compare policies at equal achieved memory", "retain.eval.compare:main"),
    "train": ("train retention gates for a model on documents", "retain.train.distill:main"),
    "report": ("write the report of a comparison again", "retain.eval.report.render:main"),
    "diagnose": ("measure how eviction changes a model's predictions", "retain.eval.diagnose:main"),
    "speed": ("measure decoding speed and memory", "retain.eval.speed:main"),
    "lm-eval": (
        "run lm-evaluation-harness with an evicting cache: retain lm-eval -- ...",
        "retain.eval.cli:lm_eval",
    ),
}


def list_policies(arguments: Sequence[str]) -> int:
    """Prints the table of presets."""
    from retain.presets import policies

    argparse.ArgumentParser(description="List the policies that ship, and what each needs.").parse_args(
        arguments
    )
    print(policies())
    return 0


def lm_eval(arguments: Sequence[str]) -> int:
    """Runs the command line of lm-eval, in a process that knows the model class `retain`: lm_eval 0.4.13
    looks for no plug-ins, so the class is imported first."""
    if [*arguments] in (["-h"], ["--help"]):
        print("usage: retain lm-eval -- ARGUMENTS\n\nRun lm-evaluation-harness; --model retain evicts.")
        return 0
    require("lm-eval", "lm_eval", what="retain lm-eval")
    import_module("retain.eval.harness.model")
    sys.argv = ["lm-eval", *(arguments[1:] if arguments[:1] == ["--"] else arguments)]
    import_module("lm_eval.__main__").cli_evaluate()
    return 0


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, as typed behind `retain` (None: of this process), and returns its exit status."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed == ["--version"]:
        print(f"retain {retain.__version__}")
        return 0
    if not typed or typed[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = "\n".join(f"  {name.ljust(width)}  {meaning}" for name, (meaning, _) in COMMANDS.items())
        print(f"usage: retain COMMAND ...\n\n{rows}\n\nretain COMMAND --help says more; retain --version.")
        return 0 if typed else 2
    _, place = lookup(typed[0], COMMANDS, what="command")
    module, _, function = place.partition(":")
    # Name of the command in argparse's usage line.
    before, sys.argv = sys.argv, [f"retain {typed[0]}", *typed[1:]]
    try:
        return int(getattr(import_module(module), function)(typed[1:]) or 0)
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
