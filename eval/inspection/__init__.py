"""`retain inspect`: what lies at a path; `retain describe`: what a model would be to a cache.

Reading order: `path`, `results`, `budget_picture`; `model`.
"""
