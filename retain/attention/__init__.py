"""Computes what attention says about entries.

Reading order: `received` (attention that entries receive, also accumulated over a conversation), `chunked`
(rows of attention, a few queries at a time), `rotary` (RoPE and its inverse).
"""
