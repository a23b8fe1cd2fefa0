"""The measuring of a comparison: units of work in, rows out.

Reading order: `checks` (before anything runs), `evaluated_model`, `gate_sources`, `baselines`, `runner` (the
loop over units), `shared_prefill` and `by_cache` with `first_read` (one unit), `answers`, `results_store`,
`processes`.
"""
