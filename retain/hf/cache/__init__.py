"""`retain.Cache`: the cache of transformers' `generate` that evicts while it is filled.

Reading order: `cache` (the public class), `state` (tokens seen, entries held), `engine` (a forward: append,
attend, evict), `bound_policy` (binds a policy to a model; `retain.eviction` decides),
`layer`, `later_evidence`, `generation` and `static_decoding` (decoding in one graph), `report`, `saving`.
"""
