"""Budgets: how many entries each sequence, layer and head may hold, in exact integers.

Reading order: `statement` (a budget as the user states it), `largest_remainder` (exact integers from
weights), `joint` (heads compete, and a share is drawn), `allocation` (which of these spreads a budget, and
what is known before any layer comes), `cascade` (all layers at once, or one after another in a prefill). How
a policy splits a budget is stated in `retain.presets`; `retain.attention.ranking` orders entries.
"""
