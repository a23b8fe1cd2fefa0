"""A study: which ingredient of a policy pays.

Reading order: `plan`, `gates`, `command`, `table`, `picture`.
"""
