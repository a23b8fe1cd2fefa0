"""Evicts from requests of a paged engine: keeps whole pages of each head, and packs them into fewer blocks.

Nothing here imports vLLM, so that the tests of the core hold it.

Reading order: `progress` (when a request is evicted from, and which blocks that frees), `tables` (block
tables of heads of different length), `pages` (the engine's memory, a page a head), `whole_pages` (budgets in
whole pages a head), `eviction` (decides about one prompt, and packs what stays), `worker` (all requests of a
worker, step by step).
"""
