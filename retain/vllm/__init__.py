"""Serves evicting policies in vLLM: entries of long prompts that a policy does not keep leave the engine's
pool, and other requests use their blocks.

A plug-in of vLLM's public registration points, without patches of its code. It is inert unless the engine is
started with `additional_config={"retain": {...}}` (docs/serving.md).

Reading order: `settings` (what is asked for, and what can be served); `packing`, without vLLM: `pages` (the
engine's memory, and block tables of heads of different length), `whole_pages` (budgets in whole pages a
head), `worker` (all requests, step by step: decides about a prompt once it is computed);
`plugin` (registers the rest), `check` (refuses engines that cannot be served), `scheduler` (frees blocks),
`models` (gates on the model's layers), `backend` (attention on a CPU), `connector` (joins scheduler and
workers), `metrics` (counters), `demo`.
"""
