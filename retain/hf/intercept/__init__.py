"""The interception of a model's forward: how a cache sees its attention.

Reading order: `interceptor` (attention functions, and the interface of caches), `attach` (the hooks),
`forward_call` (the arguments of one forward), `lookahead_pass` (tokens behind a prompt), `observe` (a whole
sequence with nothing evicted), `press` (scores of kvpress).
"""
