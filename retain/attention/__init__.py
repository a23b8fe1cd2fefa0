"""Computes what attention says about entries, and selects entries by it.

Reading order: `received` (attention that entries receive, also accumulated over a conversation), `chunk`
(rows of attention, a few queries at a time), `causal` (of whole sequences, without a matrix of all pairs),
`rotary` (RoPE and its inverse), `ranking` (entries of a head in order), `two_stage` (entries kept before
the score ranks the rest), `head_weights` (a number for each head), `dense_view` (ragged rows side by side
again, to be scored anew).
"""
