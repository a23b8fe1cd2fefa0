"""`retain.Cache`: the cache of transformers' `generate` that evicts while it is filled.

Reading order: `cache` (the public class), `state` (what it has seen and holds), `changes` (crop, select,
stack), `engine` (append, attend, evict), `regime` (when), `bound_policy` (what is kept), `eviction_request`
(the policy at work), `layer`, `batch_context`, `later_evidence`, `generation`, `report`,
`saving`.
"""
