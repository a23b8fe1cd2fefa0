"""A study: which ingredient of a policy pays.

Reading order: `plan`, `command`, `table`, `picture`.
"""
