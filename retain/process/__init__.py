"""Serves every command: names in tables, names that went, model identity, missing packages, locks, disks.

Reading order: `registry` (names looked up in tables), `removed` (names that went, and what to use now),
`fingerprint` (the identity of a model), `command` (exit status), `extras` (packages that are missing),
`provenance`, `lock`, `disk`, `half_precision`.
"""
