"""Serves evicting policies in vLLM: entries of long prompts that a policy does not keep leave the engine's
pool, and other requests use their blocks.

A plug-in of vLLM's public registration points, without patches of its code. It is inert unless the engine is
started with `additional_config={"retain": {...}}` (docs/serving.md).

Reading order: `settings` (what is asked for, and what can be served), `pages` (the engine's memory, a page a
head), `tables` (block tables of heads of different length), `decide` (keep sets of one prompt),
`scheduler` (which blocks are freed), `documents` and `document_files` (prompts that later ones share),
`worker` (what a worker knows of its requests; the eviction), `backend` (attention on a CPU), `models` (gates
beside the model's layers), `connector` (joins scheduler and workers), `metrics` (counters), `plugin`
(registers all of it).
"""
