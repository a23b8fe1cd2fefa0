"""`retain.Cache`: the cache of transformers' `generate` that evicts while it is filled.

Reading order: `cache` (the public class), `state` (what it has seen and holds), `changes` (crop, select,
stack), `engine` (append, attend, evict), `regime` (when), `bound_policy` (binds a policy to a model;
`retain.eviction` decides), `layer`, `batch_context`, `later_evidence`, `generation`, `report`, `saving`.
"""
