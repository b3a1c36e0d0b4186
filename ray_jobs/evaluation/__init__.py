"""Evaluation: labelled supports, linear probes, pixel baselines, intervals, leakage, rows of results.

The stage modules import `leakage` and `supports` when their process starts, so these two modules import torch and
scikit-learn inside the functions that use them.
"""
