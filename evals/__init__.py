"""Evaluation: samples, rows of scores, paired statistics, and the gate that decides on them."""
