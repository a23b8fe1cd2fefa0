"""The command `retain`: finds the command that is typed first, and calls it.

    retain policies                              what there is to choose from, and what each needs
    retain doctor                                versions, devices, kernels, free memory, the hub
    retain describe MODEL [--tokens 8192,131072]  what a model would evict and keep, from its config alone
    retain try [--text FILE --question TEXT]     one question, answered from a full cache and a tenth of it
    retain compare --config FILE [key=value ...] compare policies at equal achieved memory
    retain lm-eval -- ARGUMENTS                  lm-evaluation-harness, with the model class `retain`

The exit status is the command's; 2, with one line on stderr, where something that the user typed is wrong. A
command is a row of `COMMANDS`, and its module is imported only when it is called, so that `retain --help`
needs none of the extras.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

import retain
from retain.process.command import command
from retain.process.extras import MissingExtra, require
from retain.registry import lookup

__all__ = ["COMMANDS", "main"]


def _policies(arguments: Sequence[str]) -> int:
    """Prints the table of presets."""
    if [*arguments] in (["-h"], ["--help"]):
        print("usage: retain policies\n\nList the policies that ship, and what each needs.")
        return 0
    if arguments:
        raise ValueError(f"retain policies takes no arguments, got {' '.join(arguments)}.")
    from retain.presets import policies

    print(policies())
    return 0


def _lm_eval(arguments: Sequence[str]) -> int:
    """lm-eval's own command line, in a process that knows the model class `retain`.

    lm_eval 0.4.13 looks for no plug-ins, so the class is imported first. Where no model is named, `retain` is
    meant: lm-eval's own default would be the full cache.
    """
    try:
        require("lm-eval", "lm_eval", what="retain lm-eval")
    except MissingExtra as error:
        if not {"-h", "--help"} & {*arguments}:
            raise
        print(
            f"usage: retain lm-eval -- ARGUMENTS\n\nRun lm-evaluation-harness with an evicting cache. {error}"
        )
        return 0
    import_module("retain.eval.harness.model")
    entry: Callable[[], None] = import_module("lm_eval.__main__").cli_evaluate
    given = [*arguments[1:]] if arguments[:1] == ["--"] else [*arguments]
    named = {argument.partition("=")[0] for argument in given} & {"--model", "-M", "--config", "-C"}
    if not named and given and given[0] not in ("ls", "validate", "-h", "--help"):
        at = 1 if given[0] == "run" else 0
        given[at:at] = ["--model", "retain"]
    before, sys.argv = sys.argv, ["lm-eval", *given]
    try:
        entry()
    finally:
        sys.argv = before
    return 0


def _compare(arguments: Sequence[str]) -> int:
    """Runs a comparison; `--help` and wrong options end before transformers is imported."""
    from retain.eval.config import compare_parser

    compare_parser().parse_args(arguments)
    return _main_of("retain.eval.compare")(arguments)


def _try(arguments: Sequence[str]) -> int:
    """Answers one question; `--help` and wrong options end before torch is imported."""
    from retain.eval.tryout_arguments import parser

    parser().parse_args(arguments)
    return _main_of("retain.eval.tryout")(arguments)


def _main_of(module: str) -> Callable[[Sequence[str]], int]:
    """A module's `main`, imported when it is called."""

    def call(arguments: Sequence[str]) -> int:
        # Without a status it went well: what is wrong is raised.
        return int(import_module(module).main(arguments) or 0)

    return call


# name -> what it does, in a line; what it calls.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "policies": ("list the policies that ship, and what each needs", _policies),
    "doctor": (
        "report versions, devices, kernels, free memory and the hub",
        _main_of("retain.eval.inspection.doctor"),
    ),
    "describe": (
        "say what a model would evict and keep, from its config alone",
        _main_of("retain.eval.inspection.model"),
    ),
    "try": ("answer one question from a full cache and from a tenth of it", _try),
    "compare": ("compare policies at equal achieved memory", _compare),
    "lm-eval": ("run lm-evaluation-harness with an evicting cache: retain lm-eval -- ...", _lm_eval),
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: as typed behind `retain`; None: of this process.

    Returns:
        the exit status.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed == ["--version"]:
        print(f"retain {retain.__version__}")
        return 0
    if not typed or typed[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        rows = [f"  {name.ljust(width)}  {line}" for name, (line, _) in COMMANDS.items()]
        print(
            "\n".join(
                [
                    "usage: retain COMMAND ...",
                    "",
                    *rows,
                    "",
                    "retain COMMAND --help says more; retain --version.",
                ]
            )
        )
        return 0 if typed else 2
    _, call = lookup(typed[0], COMMANDS, what="command")
    # What argparse calls the command in its usage line.
    before, sys.argv = sys.argv, [f"retain {typed[0]}", *typed[1:]]
    try:
        return call(typed[1:])
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
