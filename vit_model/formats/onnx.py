"""ONNX export: a model's graph and weights for runtimes without torch.

In: a model and its contract. Out: a file with one input `images` [batch, c, height, width], float32 from
`preprocessing.normalise`, and one output: `logits` [batch, classes], or `representation` [batch, d]. A detector has
two: the `boxes` [batch, n, 4] of all places, their corners in pixels of the input, and the `scores` [batch, n,
classes]; the caller chooses among them, as `vit_model.detection.fcos.detect` does. The metadata are the fields of the
contract as JSON (`preprocessing`, `class_names` ...).

The packages of the extra "onnx" are imported inside functions, because they are optional.
Use: `write(path, model, contract)`; `write_detector(path, detector, contract)`.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vit_model.build import Network
from vit_model.config import ViTConfig
from vit_model.contract import Contract, ModelContract
from vit_model.detection.contract import DetectorContract
from vit_model.detection.detector import Detector, checked_detector
from vit_model.detection.fcos import candidates
from vit_model.weights import checked_weights

if TYPE_CHECKING:
    from onnxscript import ir


def write(path: Path, model: Network, contract: ModelContract) -> None:
    """Export the model in evaluation mode, in float32; weights beyond ONNX's limit for one file go beside it.

    Raises ValueError if the contract describes another model or a weight is NaN or infinite, and ImportError, naming
    the extra, if the packages of torch's exporter are missing.
    """
    checked_weights(model, contract)
    _write(path, model, contract, ["logits" if contract.class_names or contract.mask_classes else "representation"])


def write_detector(path: Path, detector: Detector, contract: DetectorContract) -> None:
    """Export a detector as `write` does a model. Raises as `write`."""
    checked_detector(detector, contract)
    _write(path, _Candidates(detector), contract, ["boxes", "scores"])


class _Candidates(nn.Module):
    """A detector's boxes and scores of all places."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    @property
    def config(self) -> ViTConfig:
        return self.detector.config

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return candidates(self.detector(images), self.detector.places, *self.config.image_shape)


def _write(path: Path, model: Network | _Candidates, contract: Contract, outputs: list[str]) -> None:
    config = model.config
    try:
        import onnx  # noqa: F401, torch imports it later without naming the extra
        from onnxscript.ir.passes.common import ClearMetadataAndDocStringPass
    except ImportError as error:
        raise ImportError(f"{error}; for ONNX: pip install 'vitflow[onnx]'") from error

    exported = deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)
    # Two images, because the exporter would take a batch of one for a constant.
    images = torch.zeros(2, config.in_channels, *config.image_shape)
    with _quiet():
        program = torch.onnx.export(
            exported,
            (images,),
            input_names=["images"],
            output_names=outputs,
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        ClearMetadataAndDocStringPass()(program.model)  # the exporter's notes contain paths of this machine
        _keep_zeros(program.model.graph)
        for field, value in contract.model_dump(mode="json").items():
            program.model.metadata_props[field] = json.dumps(value, ensure_ascii=False)
        program.save(path)


def _keep_zeros(graph: "ir.Graph") -> None:
    """Preserve a border of zeros around a max-pooling by replacing its zeros with the smallest positive number.

    onnxruntime (Pad_Fusion; microsoft/onnxruntime#18136) and onnxsim (#290) merge a border of zeros into the pooling,
    which pads with -inf.
    """
    from onnxscript import ir

    tiny = ir.Value(name="smallest", const_value=ir.tensor(torch.finfo(torch.float32).tiny, ir.DataType.FLOAT))
    for node in list(graph):
        border = node.inputs[0].producer() if node.op_type == "MaxPool" and node.inputs[0] else None
        if border is not None and border.op_type == "Pad":
            value = border.inputs[2] if len(border.inputs) > 2 else None
            if value is None or (value.const_value is not None and float(value.const_value.numpy()) == 0):
                graph.initializers.setdefault("smallest", tiny)
                border.resize_inputs(max(3, len(border.inputs)))
                border.replace_input_with(2, tiny)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about torch's own code; errors are still raised."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
