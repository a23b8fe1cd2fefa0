"""Objectives: targets composed from future risk, and losses towards them.

Reading order: `targets`, `case` (what a loss looks at), `losses` and `layer_output` (layer by layer),
`soft_threshold` and `soft_losses` (end to end).
"""
