"""Benchmarks of time and memory: `python -m retain.eval.speed --what WHAT`.

Reading order: `caches` (what is compared), `scoring`, `serving`, `long`, `peers` with `peer_side`, `decode`,
`eviction`. The protocol and the command are those of `retain.process.timing` and `retain.process.benchmark`.
"""
