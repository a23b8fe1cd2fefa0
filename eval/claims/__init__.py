"""Claims about a policy, checked on the rows of finished runs.

Reading order: `fused`, `lines`, `runs`.
"""
