"""Budgets: how many entries each sequence, layer and head may hold, in exact integers.

Reading order: `statement` (a budget as the user states it), `largest_remainder` (exact integers from shares),
`allocation` (over layers and heads), `head_budgets` (heads by what was measured beforehand), `shares` (what
is known before any layer comes), `cascade` (layer by layer while a model prefills), `priority_sampling` (a
share that is drawn), `budget_table`.
"""
