"""Benchmarks of time and memory: `python -m retain.eval.speed --what scoring|serving|decode|...`.

Reading order: `scoring`, `decode`, `eviction`, `serving` with `stages` and `table`, `long` with `published`,
`peers` with `peer` and `peer_side`, `cache_bytes`.
"""
