"""ONNX out: a model's graph and weights for runtimes without torch.

In: a model and its contract. Out: a file with one input `images` [batch, c, height, width], float32 as
`preprocessing.normalise` makes them, and one output: `logits` [batch, classes], or `representation` [batch, d].
Its metadata (ModelProto.metadata_props) are the parts of the contract as JSON, so that nobody has to guess.
Needs the packages of the extra "onnx".
Use: `write(path, model, contract)`.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vit_model.config import ModelContract
from vit_model.model import ViT


def write(path: Path, model: ViT, contract: ModelContract) -> None:
    """Export the model as it evaluates, float32, to `path`; weights of 2 GB or more go beside it, as ONNX has it.

    Raises ValueError when the contract describes another model, and ImportError, naming the extra, when the
    packages that torch's exporter needs are missing.
    """
    if contract.architecture != model.config:
        raise ValueError(f"contract is for {contract.architecture!r}, the model is {model.config!r}")
    try:
        import onnx  # noqa: F401, what torch imports later, with a message of its own
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{error}: ONNX export needs the extra 'onnx', pip install 'vitflow[onnx]'"
        ) from error
    config = model.config
    copy = ViT(config).eval()
    copy.load_state_dict(model.state_dict())
    # Two images: a batch of one would be taken for a constant.
    images = torch.zeros(2, config.in_channels, *config.image_shape)
    with _quiet():
        program = torch.onnx.export(
            copy,
            (images,),
            input_names=["images"],
            output_names=["logits" if config.num_classes else "representation"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            verbose=False,
        )
        assert program is not None
        parts = contract.model_dump(mode="json")
        program.model.metadata_props.update(
            {name: json.dumps(part, ensure_ascii=False) for name, part in parts.items()}
        )
        program.save(path)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on torch's own code off the console; its errors are raised all the same."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
