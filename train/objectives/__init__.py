"""Objectives: targets composed from future risk, and losses towards them.

Reading order: `targets`, `case` (a loss term's input), `losses` and `layer_output` (layer by layer),
`overlap` (how gates are judged), `fit` (whether target, loss and gate go together), `soft_threshold` and
`soft_losses` (end to end).
"""
