"""The stages of a pipeline, one module each, each runnable alone: `python -m ray_jobs.<job> --spec ATTEMPT.json`."""
