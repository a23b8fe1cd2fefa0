"""`retain inspect`: what lies at a path.

Reading order: `path`, `results`, `budget_picture`.
"""
