"""The process of a command: exit status, missing packages, locks, memory, provenance, benchmarks.

Reading order: `command`, `extras`, `provenance`, `lock`, `memory`, `timing`, `benchmark`.
"""
