"""Files outside of the store that a stage reads, on disk, S3 and the hub: found (`sources`), digested, fetched."""
