"""ONNX export: a model's graph and weights for runtimes without torch.

In: a model and its contract. Out: a file with one input `images` [batch, c, height, width], float32 from
`preprocessing.normalise`, and one output: `logits` [batch, classes], or `representation` [batch, d]. Its metadata are
the fields of the contract as JSON (`preprocessing`, `class_names` ...).

The packages of the extra "onnx" are imported inside functions, because they are optional.
Use: `write(path, model, contract)`.
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

from vit_model.build import Network
from vit_model.contract import ModelContract
from vit_model.weights import checked_weights

if TYPE_CHECKING:
    from onnxscript import ir


def write(path: Path, model: Network, contract: ModelContract) -> None:
    """Export the model in evaluation mode, in float32; weights beyond ONNX's limit for one file go beside it.

    Raises ValueError if the contract describes another model or a weight is NaN or infinite, and ImportError, naming
    the extra, if the packages of torch's exporter are missing.
    """
    config = model.config
    checked_weights(model, contract)
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
            output_names=["logits" if contract.class_names else "representation"],
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
