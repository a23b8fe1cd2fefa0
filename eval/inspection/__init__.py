"""`retain inspect`: what lies at a path; `retain describe`: a model by its config; `retain doctor`: what this
installation can do.

Reading order: `path`, `results`, `budget_picture`; `model`; `doctor`.
"""
