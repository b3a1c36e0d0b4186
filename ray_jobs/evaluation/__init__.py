"""Evaluation: labelled supports, linear probes, baselines on pixels, intervals, leakage, rows of results."""
