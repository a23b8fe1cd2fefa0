"""Attention as numbers about entries: what queries pay, and what it is computed from.

Reading order: `received` (what queries pay each entry), `running_statistics` (the same, accumulated over a
conversation), `chunked` (rows of attention, a few queries at a time), `rotary` (RoPE, and back).
"""
