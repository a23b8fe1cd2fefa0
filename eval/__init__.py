"""Comparison of eviction policies at equal achieved memory: `retain.eval`.

Run from the repository root: `python eval/compare.py --config configs/compare/demo.yaml`.
"""
