"""The process of a command: exit status, missing packages, locks, full disks, memory, provenance, benchmarks.

Reading order: `command`, `extras`, `provenance`, `lock`, `disk`, `memory`, `half_precision`, `timing`,
`benchmark`.
"""
