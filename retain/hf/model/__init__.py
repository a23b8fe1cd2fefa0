"""Hugging Face decoders: where each keeps what eviction needs.

Reading order: `families` (the table of part names), `layout` (layers that evict, and others), `decoder` (one
model described), `projection` (its weights), `pass_through_layers` (caches of layers that are left to
transformers) and `identity` (which model it is).
"""
