"""Reads documents in one row, and attends through soft gates, for training.

Reading order: `block_reader`, `causal_attention`, `soft_attention`.
"""
