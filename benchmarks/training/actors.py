"""A plain Ray job: two actors build the quickstart's model, join, and train it for one step. `actors.py DATASET MARK`.

The first actor writes the file MARK after the step.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray


class Worker:
    """Trains with plain torch, all-reducing the gradients."""

    def __init__(self, rank: int, meeting: str, dataset: str) -> None:
        import torch
        import torch.distributed as dist

        from ray_jobs.data.shards import open_dataset
        from vit_model.config import ViTConfig
        from vit_model.model import ViT

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=2)
        data = open_dataset(Path(dataset))
        config: dict[str, Any] = {"patch_size": 2, "width": 64, "depth": 4, "num_heads": 4, "mlp_dim": 256}
        self.model = ViT(ViTConfig(image_size=8, in_channels=1, num_classes=648, **config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.images = torch.zeros(128, 1, 8, 8)
        self.labels = torch.from_numpy(data.labels("train")[:128])

    def step(self, mark: str | None) -> None:
        import torch
        import torch.distributed as dist

        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        for weight in self.model.parameters():
            dist.all_reduce(weight.grad)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if mark:
            Path(mark).touch()


def main() -> None:
    dataset, mark = sys.argv[1:]
    ray.init(log_to_driver=False)
    with tempfile.TemporaryDirectory() as meeting:
        remote = ray.remote(num_cpus=1)(Worker)
        workers = [remote.remote(rank, meeting, dataset) for rank in range(2)]
        ray.get([worker.step.remote(None if rank else mark) for rank, worker in enumerate(workers)])


if __name__ == "__main__":
    main()
