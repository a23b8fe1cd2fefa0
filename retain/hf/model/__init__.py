"""Hugging Face decoders: where each keeps what eviction needs, and the gates that belong to them.

Reading order: `families` (the table of part names), `layout` (layers that evict, and others), `decoder` (one
model described), `projection` (its weights), `pass_through_layers` (caches of layers that are left to
transformers), `identity` (which model it is) and `gates` (gates by name, and those that others released).
"""
