"""The process that a command runs in: exit status, missing packages, locks, memory, clocks, provenance.

Reading order: `command`, `extras`, `provenance`, `lock`, `memory`, `stopwatch`.
"""
