"""Hugging Face decoders: where each keeps what eviction needs, and the gates that belong to them.

Reading order: `families` (the table of part names), `layout` (layers that evict, and others), `decoder` (one
model described), `projection` and `rotary_probe` (its weights and its RoPE), `pass_through_layers` (caches of
layers that are left to transformers), `footprint` (what their caches take), `gates` and `published` (gates
by name, and those that others released).
"""
