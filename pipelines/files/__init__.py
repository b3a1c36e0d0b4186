"""Files outside of the store that a stage reads: on S3 (`s3`) and on the Hugging Face hub (`hub`)."""
