"""The interception of a model's forward: how a cache sees its attention.

Reading order: `interceptor` (the interface), `attach` (the hooks), `attention_names` (transformers' tables),
`forward_call` (what one forward was given), `mask_checks` (of decoding steps), `ended_sequences` (what
`generate` has ended), `lookahead_pass` (tokens behind a prompt), `observe` (a whole sequence with nothing
evicted), `press` (scores of other libraries), `chunked_feed_forward`.
"""
