"""Evicts from requests of a paged engine, without vLLM: keeps whole pages of each head, and packs them."""
