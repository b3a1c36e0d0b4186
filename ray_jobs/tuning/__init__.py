"""Sweeps of a fine-tuning: the points that they try, their trials on Ray Tune, the refits, and the ledger of both."""
