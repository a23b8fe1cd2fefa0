"""The only part of `retain` that knows transformers.

`model` says where a checkpoint keeps what the rest needs, `attach` connects a model to our cache and undoes
it, `cache` is the cache that `model.generate` is given. Tried with
transformers 5.17 on Llama, Qwen2 and Qwen3.
"""
