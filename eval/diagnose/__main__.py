"""Runs `python -m retain.eval.diagnose`."""

import sys

from retain.eval.diagnose.command import main

sys.exit(main())
