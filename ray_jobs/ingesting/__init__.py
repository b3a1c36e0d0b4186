"""Parts of ingest: splits and copies, reuse of earlier attempts and datasets, the dataset's card."""
