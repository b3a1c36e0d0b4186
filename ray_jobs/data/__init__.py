"""The data path: shards on disk or S3, decoded, sampled and batched for training.

Ingest uses this package without torch; only `crops` and `loader` import torch.
"""
