"""lm-evaluation-harness with an evicting cache: `model`."""
