"""Refuses graphs that a runtime would mis-read. Run on every finished graph, and by ``seal`` on an edited one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from tformer_deploy.bundle.manifest import WEIGHTS
from tformer_deploy.bundle.signature import ONNX_DTYPES, OPSET, PHASES, Phase, TensorSignature, graph_inputs, graph_outputs
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import DType, ModelConfig

# Positions of Attention's inputs and TensorScatter's cache.
_MASK, _FIRST_PAST, _NONPAD = 3, 4, 6
_NORMS = ("LayerNormalization", "RMSNormalization")
# Shapes, scalars and the like; anything larger is a weight, and belongs to both graphs.
_CONSTANT_BYTES = 64 * 1024


def require_clean(model: ir.Model, config: ModelConfig, dtype: DType, phase: Phase) -> None:
    """Refuses a graph that has faults, all named at once.

    Raises:
        InputError: There is at least one.
    """
    faults = list(graph_faults(model, config, dtype, phase))
    if faults:
        raise InputError(f"{phase}.onnx cannot be used:\n  " + "\n  ".join(faults))


def bundle_faults(bundle: Bundle) -> list[str]:
    """The faults of both graphs of a bundle."""
    manifest, faults = bundle.manifest, []
    for phase in PHASES:
        model = ir.load(bundle.path / f"{phase}.onnx")
        faults += [f"{phase}.onnx: {f}" for f in graph_faults(model, manifest.config, manifest.dtype, phase)]
    return faults


def graph_faults(model: ir.Model, config: ModelConfig, dtype: DType, phase: Phase) -> Iterator[str]:
    """What a runtime would refuse or mis-read, a sentence each."""
    if model.opset_imports != {"": OPSET}:
        yield f"opsets are {dict(model.opset_imports)}; expected {OPSET} of the standard domain alone."
    if model.functions:
        yield f"it has {len(model.functions)} local functions; expected none."
    yield from _signature_faults(model.graph, config, dtype, phase)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain not in ("", "ai.onnx"):
            yield f"{_place(node)} is of the domain {node.domain}; only standard operators are portable."
        if node.op_type == "Transpose" and (table := node.inputs[0]) is not None and table.is_initializer():
            yield f"{_place(node)} transposes the initializer {table.name}; store it transposed."
        if node.op_type in _NORMS and node.attributes.get_int("stash_type", 1) != 1:
            yield f"{_place(node)} does not compute in fp32; expected stash_type 1."
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    if len(attentions) != config.n_layers:
        yield f"there are {len(attentions)} Attention nodes; expected {config.n_layers}, one a layer."
    for layer, node in enumerate(attentions):
        causal = phase == "prefill" and layer not in config.window_layers and config.positions != "alibi"
        yield from _attention_faults(node, phase, causal, config.attention_softcap or 0.0)
    yield from _cache_faults(model.graph)
    yield from _weight_faults(model.graph)


def _weight_faults(graph: ir.Graph) -> Iterator[str]:
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            if str(tensor.location) != WEIGHTS:
                yield f"initializer {name} lies in {str(tensor.location)!r}; expected {WEIGHTS}."
        elif tensor is None or tensor.nbytes > _CONSTANT_BYTES:
            yield f"initializer {name} lies in the graph itself; expected {WEIGHTS}."


def _place(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}"


def _attention_faults(node: ir.Node, phase: Phase, square: bool, softcap: float) -> Iterator[str]:
    """``square``: the layer sees everything before a token and nothing was cached, so that no mask is needed."""
    inputs = list(node.inputs)
    causal = node.attributes.get_int("is_causal", 0)
    mask = len(inputs) > _MASK and inputs[_MASK] is not None
    if len(inputs) > _NONPAD and inputs[_NONPAD] is not None:
        yield f"{_place(node)} has nonpad_kv_seqlen, which TensorRT-RTX drops with a warning."
    if any(i is not None for i in inputs[_FIRST_PAST:_NONPAD]):
        yield f"{_place(node)} takes past keys or values; the cache is written by TensorScatter."
    if len([o for o in node.outputs if o.name]) > 1:
        yield f"{_place(node)} has {len(node.outputs)} outputs; TensorRT accepts one."
    if mask and causal:
        yield f"{_place(node)} has a mask and is_causal, which TensorRT refuses."
    if square and (mask or not causal):
        yield f"{_place(node)} in {phase} must be causal, without a mask."
    if not square and (causal or not mask):
        yield f"{_place(node)} in {phase} must take the mask, without is_causal."
    found = node.attributes.get_float("softcap", 0.0)
    if abs(found - softcap) > 1e-6 * softcap:
        yield f"{_place(node)} has the softcap {found:g}; the model's is {softcap:g}."
    if node.attributes.get("softmax_precision") is not None:
        yield f"{_place(node)} sets softmax_precision, which TensorRT refuses."


def _cache_faults(graph: ir.Graph) -> Iterator[str]:
    inputs = set(graph.inputs)
    for output in graph.outputs:
        name = str(output.name)
        if not name.startswith("present."):
            continue
        producer = output.producer()
        if producer is None or producer.op_type != "TensorScatter":
            kind = producer.op_type if producer else "nothing"
            yield f"{name} comes from {kind}; expected TensorScatter, which updates the cache in place."
            continue
        cache, past = producer.inputs[0], name.replace("present.", "past_key_values.")
        if cache is None or cache not in inputs or cache.name != past:
            yield f"{name} is written over {cache.name if cache else None}; expected the input {past}."
        elif others := [u.node for u in cache.uses() if u.node is not producer and u.node.op_type != "Shape"]:
            yield f"{past} is read by {_place(others[0])} too, though TensorScatter overwrites it in place."
        if producer.attributes.get_int("axis", -2) not in (2, -2):
            yield f"{name} is written along axis {producer.attributes.get_int('axis', -2)}; expected the capacity, axis 2."
        if producer.attributes.get_string("mode", "linear") != "linear":
            yield f"{name} is written in circular mode, which TensorRT refuses."


def _signature_faults(graph: ir.Graph, config: ModelConfig, dtype: DType, phase: Phase) -> Iterator[str]:
    for kind, found, wanted in (
        ("input", graph.inputs, graph_inputs(config, dtype, phase)),
        ("output", graph.outputs, graph_outputs(config, dtype)),
    ):
        names = [str(v.name) for v in found]
        if names != [w.name for w in wanted]:
            yield f"its {kind}s are {', '.join(names)}; expected {', '.join(w.name for w in wanted)}."
            continue
        for value, signature in zip(found, wanted, strict=True):
            if (text := _typed(value)) != (expected := _expected(signature)):
                yield f"{kind} {signature.name} is {text}; expected {expected}."


def _typed(value: ir.Value) -> str:
    dims = [] if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    return f"{value.dtype.name if value.dtype else None}{dims}"


def _expected(signature: TensorSignature) -> str:
    return f"{ONNX_DTYPES[signature.dtype]}{list(signature.dims)}"
