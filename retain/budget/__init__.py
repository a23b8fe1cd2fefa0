"""Budgets: how many entries each sequence, layer and head may hold, in exact integers.

Reading order: `statement` (a budget as the user states it), `largest_remainder` (exact integers from
weights), `ranking` (entries of a head in order), `split` (how a policy splits a budget), `head_weights` (a
number for each head), `joint` (heads compete, and a share is drawn), `allocation` (which of these spreads a
budget, and what is known before any layer comes), `two_stage` (entries kept before the score ranks the rest),
`cascade` (all layers at once, or one after another in a prefill).
"""
