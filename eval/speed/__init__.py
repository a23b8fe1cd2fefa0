"""Benchmarks of time and memory: `python -m retain.eval.speed --what WHAT`.

Reading order: `caches` (what is compared), `stages`, `scoring`, `serving`, `long`, `peers` with `peer_side`,
`decode`, `eviction`, `gamma`; `engine` with `engine_side` (an engine of vLLM). The protocol and the command
are those of `retain.process.timing` and `retain.process.benchmark`.
"""
