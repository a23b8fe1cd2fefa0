"""Studies that are over, each run by `python -m retain.eval.studies.NAME`; no part of the wheel.

`parity` (kept entries beside kvpress), `conversation` with `dialogue`, `episodes` (a cache an episode beside
one cache), `interval_coverage` (simulated coverage of the intervals), `reach` (bytes at which policies reach
a share of the full cache's score), `debian_prose` (texts that no gate was trained on).
"""
