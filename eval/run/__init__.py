"""The measuring of a comparison: units of work in, rows out.

Reading order: `runner` (the loop over units), `cells` (one batch of items: what is held, what is answered),
`caches` (one reading of the contexts, a cache for each cell) with `first_forward` and `scoring`, `answers`,
`results_store`; then what comes before: `checks`, `evaluated_model`, `gate_sources`, `baselines`,
`processes`.
"""
