"""Files outside the store that a stage reads, on disk, S3 or the hub: listing, digesting, fetching them.

boto3 and huggingface_hub take longer to import than planning without them, so `s3_client` and `hub` are imported
when needed.
"""
