"""Studies that are over, each run by `python -m retain.eval.studies.NAME`; no part of the wheel.

`parity` (kept entries beside kvpress), `conversation` with `dialogue`, `interval_coverage` (simulated
coverage of the intervals).
"""
