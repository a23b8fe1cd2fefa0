"""Defines the command line of `train/distill.py`, without importing what a run needs."""

import argparse


def distill_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        prog="train/distill.py", description="Train retention gates by distillation."
    )
    parser.add_argument(
        "--config", required=True, metavar="YAML", help="for instance configs/distill/reference.yaml"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make one step on the longest documents, say what it took, and stop",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for instance model=reference:0 training.steps=100"
    )
    return parser
