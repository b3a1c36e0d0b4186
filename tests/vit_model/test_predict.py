"""With several labels per image, an answer has every class that reaches its threshold, or else the likeliest."""

import numpy as np
import torch

from tests.support.vits import TINY, contract_for, randomised
from vit_model.config import ViTConfig
from vit_model.predict import TOP, answer
from vit_model.preprocessing import normalise


def test_every_class_that_reaches_its_threshold_is_in_the_answer() -> None:
    config = ViTConfig(**TINY, num_classes=9)
    model = randomised(config).eval()
    images = np.random.default_rng(0).integers(0, 256, (2, *config.image_shape, 3), np.uint8)
    contract = contract_for(config).model_copy(update={"problem_type": "multi_label_classification"})
    with torch.inference_mode():
        logits = model(normalise(torch.from_numpy(images), contract.preprocessing, torch.float32))
    probabilities = logits.sigmoid().numpy()
    least = int(probabilities[0].argmin())
    low, all_low, high = (1.0,) * least + (0.0,) + (1.0,) * (8 - least), (0.0,) * 9, (1.0,) * 9
    for thresholds, shown in ((low, TOP + 1), (all_low, 9), (high, TOP)):
        found = answer(model, contract.model_copy(update={"thresholds": thresholds}), images)[0]
        order = np.argsort(-probabilities[0], kind="stable").tolist()
        reached = [label for label in order if probabilities[0, label] >= thresholds[label]]
        expected = [label for rank, label in enumerate(order) if rank < TOP or label in reached]
        assert [line["class"] for line in found["top"]] == [str(label) for label in expected]
        assert [line["threshold"] for line in found["top"]] == [thresholds[label] for label in expected]
        assert len(expected) == shown and {*found["classes"]} == {str(label) for label in reached}
