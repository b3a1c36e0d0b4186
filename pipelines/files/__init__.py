"""Files outside the store that a stage reads, on disk, S3 or the hub: listing, digesting, fetching them.

boto3 takes longer to import than planning without it, so `s3` is imported when needed.
"""
