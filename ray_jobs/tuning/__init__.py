"""Sweeps of a fine-tuning: the points to try, their trials on Ray Tune, the refits, and the ledger of both."""
