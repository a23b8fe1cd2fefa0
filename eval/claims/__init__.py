"""Claims in YAML rows (`configs/claims`), checked on the rows of finished runs.

Reading order: `claim`, `runs`, `check`, `page`, `command`; `orderings` for those that papers published.
"""
