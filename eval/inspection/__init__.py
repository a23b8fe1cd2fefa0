"""`retain inspect`: what lies at a path; `retain doctor`: what this installation can do.

Reading order: `path`, `results`, `budget_picture`; `doctor`.
"""
