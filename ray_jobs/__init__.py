"""The stages of a pipeline, one module each. Each runs alone: `python -m ray_jobs.<job> --spec ATTEMPT.json`.

That process only submits the work. To start fast, the stage modules import Ray, torch and scikit-learn inside the
functions that use them.
"""
