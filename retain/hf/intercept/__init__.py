"""The interception of a model's forward: how a cache sees its attention.

Reading order: `interceptor` (attention functions, and the interface of caches), `attach` (the hooks),
`forward_call` (what one forward was given), `lookahead_pass` (tokens behind a prompt), `observe` (a whole
sequence with nothing evicted), `press` (scores of other libraries), `chunked_feed_forward`.
"""
