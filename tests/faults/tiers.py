"""Holds the commands of the test tiers: the only place that the fault runs take them from.

`python` stands for the interpreter of the tree under test. The Makefile's `test` runs the same command.
"""

TIERS: dict[str, tuple[str, ...]] = {
    "default": ("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--timeout", "900"),
    "whole": ("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", "--timeout", "900", "--all"),
}
