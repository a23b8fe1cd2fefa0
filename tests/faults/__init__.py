"""Measures which single-line faults the tiers of tests catch.

    make faults-draw    draws 40 faults from SEED, stratified by room, into results/faults/drawn.jsonl
    make faults         runs the tiers against each, into results/faults/results.jsonl and table.md

`make faults` goes on where it was stopped. Reading order: `tiers` (the commands), `draw` (the faults),
`checkout` (the temporary copy of the tree), `run`, `table`. `equivalent.yaml` gives the reason of each fault
that changes no behaviour.
"""
