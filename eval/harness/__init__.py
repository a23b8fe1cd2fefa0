"""lm-evaluation-harness with an evicting cache.

Reading order: `model`, `arguments`.
"""
