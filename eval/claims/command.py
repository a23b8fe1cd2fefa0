"""The command that checks claims on finished runs.

    retain claims results/RUN [results/RUN2 ...] [--claims FILE] [--policy fused --gate gate] [--check]

Several runs, each with regimes of its own, are read as one. `claims.md` and `claims.json` go into the first.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from retain.eval.claims.check import check_claim
from retain.eval.claims.claim import all_hold, load_claims
from retain.eval.claims.page import write_claims
from retain.eval.claims.runs import check_conditions, join, parts_of
from retain.eval.report.run import Run
from retain.process.command import command


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Check claims on folders of results, write what was found, and say how each claim came out."""
    parser = argparse.ArgumentParser(prog="retain claims", description="Check claims on finished runs.")
    parser.add_argument(
        "folders", type=Path, nargs="+", help="results/<run>; several are read as one, each with own regimes"
    )
    parser.add_argument("--claims", type=Path, help="YAML of claims; default: those of the fused policy")
    parser.add_argument("--policy", help="what the claims are about; default: as the file says")
    parser.add_argument("--gate", help="its own gate alone; default: as the file says")
    parser.add_argument(
        "--also",
        action="append",
        help="another line that the policy is shown beside; again for more; default: all with its gates",
    )
    parser.add_argument("--oracle", help="the reference that knows the future; default: as the file says")
    parser.add_argument("--resamples", type=int, default=5000, help="at most of a sign-flip test")
    parser.add_argument("--out", type=Path, help="where claims.md and claims.json go; default: the first")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every claim holds")
    given = parser.parse_intermixed_args(arguments)
    stated = load_claims(given.claims)
    runs = [Run.read(folder) for folder in given.folders]
    manifests = [run.manifest for run in runs]
    scores = join([(run.scores, run.manifest) for run in runs])
    names = {part: getattr(given, part) or getattr(stated, part) for part in ("policy", "gate", "oracle")}
    parts = parts_of(scores, manifests, **names, also=given.also)
    shown = tqdm(stated.claims, desc="claims", unit="claim", leave=False)
    claims = [check_claim(one, scores, parts, resamples=given.resamples) for one in shown]
    conditions = check_conditions(scores, parts, manifests, stated.conditions)
    options = {"resamples": given.resamples}
    path = write_claims(given.out or given.folders[0], manifests, parts, claims, conditions, options)
    for condition in conditions:
        if not condition.holds:
            print(f"condition not met: {condition.text}: {condition.numbers}")
    for claim in claims:
        print(f"{claim.outcome}: {claim.text}")
    print(f"Claims: {path}, {path.with_suffix('.json')}")
    return 0 if not given.check or all_hold(claims, conditions) else 1


if __name__ == "__main__":
    sys.exit(main())
