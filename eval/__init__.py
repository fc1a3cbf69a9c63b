"""Scores of a model: bits per byte (bpb.py) and in-context learning (icl.py)."""
