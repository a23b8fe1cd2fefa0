"""Calibration: what is fitted after training, on held-out documents.

Reading order: `fit`, `isotonic` (curves from score to risk).
"""
