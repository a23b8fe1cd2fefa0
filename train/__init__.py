"""Distillation of retention gates from a frozen language model: `retain.train`.

Run from the repository root:
`accelerate launch --quiet train/distill.py --config configs/distill/reference.yaml`.
"""
