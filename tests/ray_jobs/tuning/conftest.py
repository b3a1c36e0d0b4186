"""As for the tests of training."""

from tests.ray_jobs.training.conftest import torch_as_before  # noqa: F401
