"""The stages of a pipeline, one module each, every one runnable alone: `python -m ray_jobs.<job> --spec ATTEMPT.json`."""
