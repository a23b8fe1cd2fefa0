"""Runs `python -m retain.eval.speed --what WHAT`: one command for all benchmarks of this room."""

import sys
from collections.abc import Sequence

from retain.eval.speed import decode, engine, eviction, gamma, long, peers, scoring, serving
from retain.process import benchmark
from retain.process.command import status_of

BENCHMARKS = [one.BENCHMARK for one in (scoring, serving, peers, decode, long, eviction, engine, gamma)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that `--what` names."""
    return benchmark.main(BENCHMARKS, arguments)


if __name__ == "__main__":
    sys.exit(status_of(main))
