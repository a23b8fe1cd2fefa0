"""Reads documents in one row, and attends through soft gates, for training.

Reading order: `block_reader`, `soft_attention`.
"""
