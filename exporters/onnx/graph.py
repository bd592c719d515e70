"""Decoder → ``prefill`` and ``decode`` graphs, traced on the meta device: no weight is ever held here."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn

from tformer_deploy.bundle.manifest import WEIGHTS, TensorRecord
from tformer_deploy.bundle.quantization import untied
from tformer_deploy.bundle.signature import OPSET, Phase, graph_inputs, graph_outputs
from tformer_deploy.exporters.onnx.marks import MARKS, mark_blocks, name_marked_values
from tformer_deploy.exporters.onnx.quantized import IR_DTYPES, quantize_graph
from tformer_deploy.exporters.onnx.translation import TRANSLATION
from tformer_deploy.reference.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tformer_deploy.bundle.quantization import Quantization
    from tformer_deploy.config import DType, ModelConfig

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
}
# Sizes seen while tracing; all different, so that no two dims are taken for one.
_EXAMPLE = {"batch": 2, "sequence": 5, "num_logits": 3, "capacity": 48}
# Optimiser limits: shapes and scalars are folded, weights are not.
_FOLD_BYTES = 1024


class _Phase(nn.Module):
    """One phase of a Decoder with the graph's inputs as positional arguments."""

    def __init__(self, decoder: Decoder, phase: Phase) -> None:
        super().__init__()
        self.decoder = decoder
        self.phase = phase

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        n_leading = 2 if self.phase == "prefill" else 3
        leading, past = inputs[:n_leading], inputs[n_leading:]
        if self.phase == "prefill":
            return self.decoder.prefill(leading[0], leading[1], past)
        return self.decoder.decode(leading[0], leading[1], leading[2], past)


def build_graph(
    config: ModelConfig,
    dtype: DType,
    phase: Phase,
    tensors: dict[str, TensorRecord],
    build_id: str,
    quantization: Quantization | None = None,
) -> ir.Model:
    """Traces one phase and points its initializers into ``weights.bin``.

    Args:
        config: The model.
        dtype: dtype of weights and caches.
        phase: Which graph.
        tensors: Where each parameter lies.
        build_id: Written into both graphs, so that graphs of two exports are never mixed.
        quantization: How matrices are stored; None: in ``dtype``.

    Returns:
        An optimised model whose bytes depend on the arguments and the libraries' versions only.
    """
    if quantization is not None:
        config = untied(config)
    with torch.device("meta"):
        decoder = Decoder(config)
        mark_blocks(decoder)
        model = _Phase(decoder, phase).eval().to("meta", TORCH_DTYPES[dtype])
        inputs = graph_inputs(config, dtype, phase)
        example = tuple(
            torch.zeros([_EXAMPLE[d] if isinstance(d, str) else d for d in i.dims], dtype=TORCH_DTYPES[i.dtype]) for i in inputs
        )
    dims = {name: torch.export.Dim(name, min=1, max=2**31 - 1) for name in _EXAMPLE}
    dynamic = tuple({axis: dims[d] for axis, d in enumerate(i.dims) if isinstance(d, str)} for i in inputs)
    with _quiet_tracer():
        program = torch.onnx.export(
            model,
            example,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=TRANSLATION | MARKS,
            dynamic_shapes={"inputs": dynamic},
            input_names=[i.name for i in inputs],
            output_names=[o.name for o in graph_outputs(config, dtype)],
        )
    assert program is not None
    traced = program.model
    _take_weights(traced, tensors)
    # It warns about every weight that it cannot read, which is what we want of it.
    logging.getLogger("onnx_ir.passes.common.initializer_deduplication").setLevel(logging.ERROR)
    onnxscript.optimizer.optimize_ir(traced, input_size_limit=_FOLD_BYTES, output_size_limit=_FOLD_BYTES)
    name_marked_values(traced)
    if quantization is not None:
        quantize_graph(traced.graph, tensors, quantization.dynamic)
    _point_into_weights(traced, tensors)
    _declare_signature(traced, config, dtype, phase)
    _strip(traced, phase, build_id)
    return traced


@contextlib.contextmanager
def _quiet_tracer() -> Iterator[None]:
    """Hides what tracing says about itself: deprecations inside torch, a package it would like to have, dims named twice."""
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        registration.setLevel(level)


def _take_weights(model: ir.Model, tensors: dict[str, TensorRecord]) -> None:
    """Names the parameters as the bundle does and takes their values out, so that no optimisation can look at them."""
    for name, value in list(model.graph.initializers.items()):
        parameter = name.removeprefix("decoder.")
        if parameter not in tensors:
            continue  # a small constant that tracing made
        const = value.const_value
        assert const is not None
        shape = ir.Shape(const.shape.numpy())
        model.graph.initializers.pop(name)
        value.name, value.const_value = parameter, None
        value.shape, value.dtype = shape, const.dtype
        model.graph.initializers[parameter] = value


def _point_into_weights(model: ir.Model, tensors: dict[str, TensorRecord]) -> None:
    for name, record in tensors.items():
        value = model.graph.initializers.get(name)
        if value is None:
            continue
        assert value.shape is not None
        assert tuple(value.shape.numpy()) == record.shape, (name, value.shape, record.shape)
        assert value.dtype == IR_DTYPES[record.dtype], (name, value.dtype, record.dtype)
        value.const_value = ir.ExternalTensor(
            WEIGHTS, record.offset, record.size, value.dtype, shape=ir.Shape(record.shape), name=name, base_dir=""
        )


def _declare_signature(model: ir.Model, config: ModelConfig, dtype: DType, phase: Phase) -> None:
    """Writes the signature's dims on the graph's inputs and outputs; tracing names some of them by formulas."""
    wanted = [*graph_inputs(config, dtype, phase), *graph_outputs(config, dtype)]
    for value, signature in zip([*model.graph.inputs, *model.graph.outputs], wanted, strict=True):
        assert value.name == signature.name, (value.name, signature.name)
        value.shape = ir.Shape(list(signature.dims))


def _strip(model: ir.Model, phase: Phase, build_id: str) -> None:
    """Drops what tracing says about itself (stack traces, source paths): the same model gives the same bytes anywhere."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.clear()
        node.doc_string = None
        for output in node.outputs:
            output.metadata_props.clear()
    values: list[Any] = [*model.graph.inputs, *model.graph.initializers.values()]
    for value in values:
        value.metadata_props.clear()
        value.doc_string = None
    model.graph.metadata_props.clear()
    model.graph.doc_string, model.doc_string = None, None
    model.graph.name, model.producer_name, model.producer_version = phase, "tformer-deploy", ""
    model.metadata_props.clear()
    model.metadata_props.update({"tformer_deploy.build": build_id, "tformer_deploy.phase": phase})


def save_graph(model: ir.Model, path: str) -> None:
    """Writes the graph; the weights stay where ``weights.bin`` has them."""
    ir.save(model, path)
