"""Runs `python -m retain.eval.study`."""

import sys

from retain.eval.study.command import main
from retain.process.command import status_of

sys.exit(status_of(main))
