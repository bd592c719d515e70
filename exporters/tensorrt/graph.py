"""The graph that TensorRT parses: the portable decode graph with its capacity fixed, beside the weights."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import onnx

from tformer_deploy.bundle.manifest import WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle import Bundle

FIXED = "fixed.onnx"


def write_fixed_graph(bundle: Bundle, capacity: int, folder: Path) -> Path:
    """Writes ``fixed.onnx`` into ``folder`` and makes the weights visible beside it; the bundle is not touched."""
    proto = onnx.load(bundle.decode_path, load_external_data=False)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = capacity
    path = folder / FIXED
    path.write_bytes(proto.SerializeToString(deterministic=True))
    try:
        os.link(bundle.weights_path, folder / WEIGHTS)
    except OSError:  # another file system, or one without links
        shutil.copyfile(bundle.weights_path, folder / WEIGHTS)
    return path
