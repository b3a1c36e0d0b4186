"""The data path: shards on disk or S3, decoded, sampled and batched for training."""
