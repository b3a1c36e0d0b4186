"""Pure ViT: one linear projection of patches, no convolution, no teacher"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipelines.spec import Optimizer
from ray_jobs.training.optim import learning_rate, make_optimizer, set_learning_rate
from vit_model.config import ViTConfig
from vit_model.model import ViT

SIDE, CLASSES = 28, 10


def options(words: list[str]) -> argparse.Namespace:
    """The settings. Their defaults are a start; nothing has been chosen on dev yet."""
    parser = argparse.ArgumentParser()
    for name, default in (
        ("patch", 4),
        ("width", 128),
        ("depth", 6),
        ("heads", 4),
        ("batch", 256),
        ("epochs", 10.0),
        ("rate", 2e-3),
        ("decay", 0.05),
        ("optimizer", "adamw"),
        ("smoothing", 0.1),
        ("ema", 0.0),
        ("shift", 2),
        ("drop", 0.0),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args(words)


def build(settings: argparse.Namespace) -> ViT:
    """Return a ViT on 28 x 28 pixels, with the mean of the tokens."""
    return ViT(
        ViTConfig(
            image_size=SIDE,
            in_channels=1,
            num_classes=CLASSES,
            patch_size=settings.patch,
            width=settings.width,
            depth=settings.depth,
            num_heads=settings.heads,
            mlp_dim=4 * settings.width,
            pooling="gap",
            stochastic_depth=settings.drop,
        )
    )


def train(data: str, seed: str, model: str, *words: str) -> None:
    """Train for some epochs, and write the weights."""
    settings = options([*words])
    torch.manual_seed(int(seed))
    images = normalised(torch.from_numpy(np.load(Path(data) / "images.npy")))
    labels = torch.from_numpy(np.load(Path(data) / "labels.npy")).long()
    vit = build(settings)
    vit.initialise(seed=int(seed))
    steps = round(settings.epochs * len(images) / settings.batch)
    rule = Optimizer(name=settings.optimizer, weight_decay=settings.decay, warmup_fraction=0.1)
    optimizer = make_optimizer(vit, rule, base=settings.rate)
    loss_of = nn.CrossEntropyLoss(label_smoothing=settings.smoothing)
    average = {name: value.clone() for name, value in vit.state_dict().items()} if settings.ema else None
    began, order = time.monotonic(), torch.empty(0, dtype=torch.long)
    for step in range(steps):
        if len(order) < settings.batch:
            order = torch.cat([order, torch.randperm(len(images))])
        chosen, order = order[: settings.batch], order[settings.batch :]
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(vit(changed(images[chosen], settings.shift)).float(), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        set_learning_rate(optimizer, learning_rate(step, steps, settings.rate, rule))
        optimizer.step()
        if average is not None:
            with torch.no_grad():
                decay = min(settings.ema, (1 + step) / (10 + step))
                for name, value in vit.state_dict().items():
                    average[name].lerp_(value, 1 - decay)
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    torch.save({"settings": [*words], "weights": average or vit.state_dict()}, model)


def predict(model: str, images: str, predictions: str) -> None:
    """Predict the classes; no flips, no averages of several crops."""
    saved = torch.load(model, weights_only=True)
    vit = build(options(saved["settings"]))
    vit.load_state_dict(saved["weights"])
    vit.eval()
    with torch.inference_mode():
        parts = normalised(torch.from_numpy(np.load(images))).split(1000)
        np.save(predictions, torch.cat([vit(part).argmax(1) for part in parts]).numpy())


def normalised(images: torch.Tensor) -> torch.Tensor:
    """[n, 28, 28] uint8 -> [n, 1, 28, 28] with mean 0 and deviation 1 over Fashion-MNIST."""
    return ((images.float() / 255 - 0.286) / 0.353)[:, None]


def changed(images: torch.Tensor, shift: int) -> torch.Tensor:
    """Flip each image with probability 1/2, and shift it by up to `shift` pixels."""
    flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    padded = nn.functional.pad(flipped, (shift,) * 4, value=(0 - 0.286) / 0.353)
    rows, columns = torch.randint(0, 2 * shift + 1, (2, len(images), 1)) + torch.arange(SIDE)
    return padded[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, None]


if __name__ == "__main__":
    {"train": train, "predict": predict}[sys.argv[1]](*sys.argv[2:])
