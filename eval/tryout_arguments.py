"""The command line of `retain try`, without what a run of it imports."""

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "retain try", description="Ask one question of a text, from a full cache and from a tenth of it."
    )
    made.add_argument("--text", type=Path, help="file in UTF-8; without it, a text that ships")
    made.add_argument("--question", help="asked of the text")
    made.add_argument("--begins", help="how the answer begins: small models need it (left out: it is theirs)")
    made.add_argument("--model", default="smollm2-135m", help="name, folder or hub name of a model")
    made.add_argument("--gates", help="folder or hub id; left out: those that ship for the model")
    made.add_argument("--policy", default="", help="preset that takes the gates; left out: the default one")
    made.add_argument("--keep-ratio", type=float, default=0.1, help="kept / seen")
    made.add_argument("--out", type=Path, default=Path("retain-try.html"), help="the page")
    made.add_argument("--dtype", default="auto", help="of the weights, as torch calls it")
    made.add_argument("--device", default="cpu", help="where the model runs")
    return made
