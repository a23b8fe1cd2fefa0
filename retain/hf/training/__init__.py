"""What training needs of a model: documents read in one row, and entries that fade.

Reading order: `block_reader`, `causal_attention`, `soft_attention`.
"""
