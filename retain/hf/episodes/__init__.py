"""Several caches of one context, each kept for what one of its topics asks (EpiCache, arXiv 2509.17396).

Reading order: `episodes` (segments, embeddings, routing, the caches), `kmeans` (the clusters),
`patched_prompt` (one cache, kept by the attention of tokens that are read and forgotten).
"""
