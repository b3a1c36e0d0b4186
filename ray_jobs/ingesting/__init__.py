"""Parts of ingest: the split, copies, reuse of earlier data sets, the data set's card."""
