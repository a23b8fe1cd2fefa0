"""Runs `draw`, `run` or `table`: see the package's docstring."""

import argparse
import signal
import sys
from pathlib import Path

from tests.faults.draw import COUNT, draw, read_faults, write_faults
from tests.faults.run import read_results, run_faults
from tests.faults.table import make_table, read_reasons
from tests.faults.tiers import TIERS

ROOT = Path(__file__).resolve().parents[2]
REASONS = Path(__file__).with_name("equivalent.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("command", choices=("draw", "run", "table"))
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results" / "faults", help="folder of what is written"
    )
    parser.add_argument("--workers", type=int, default=1, help="copies of the tree that run at the same time")
    parser.add_argument(
        "--limit", type=float, help="seconds of one run (default: three times the tier's own)"
    )
    parser.add_argument("--keep-caught", action="store_true", help="ask again only about survivors")
    asked = parser.parse_args()
    drawn = asked.out / "drawn.jsonl"
    if asked.command == "draw":
        write_faults(drawn, draw(ROOT))
        print(f"{COUNT} faults: {drawn}")
        return
    faults = read_faults(drawn)
    if asked.command == "run":
        run_faults(ROOT, faults, asked.out, TIERS, asked.workers, asked.limit, asked.keep_caught)
        return
    table = make_table(faults, read_results(asked.out / "results.jsonl"), read_reasons(REASONS))
    (asked.out / "table.md").write_text(table, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the tests that run are ended
    main()
