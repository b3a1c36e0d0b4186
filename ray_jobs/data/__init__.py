"""The data path: shards on disk or S3, decoded, sampled and batched for training.

`decode.cropped` imports torch itself, because ingest uses this room without torch; `loader` imports it at the top.
"""
