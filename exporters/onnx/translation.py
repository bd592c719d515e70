"""Our PyTorch operations → one standard ONNX operator each (opset 24)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnxscript
import torch

from tformer_deploy.bundle.signature import OPSET
from tformer_deploy.reference import ops as _ops  # registers torch.ops.tformer

if TYPE_CHECKING:
    from collections.abc import Callable

assert _ops.tensor_scatter is not None
op = onnxscript.values.Opset("", OPSET)


def _first(outputs: Any) -> Any:
    """Attention has four outputs in the standard; TensorRT accepts one."""
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def _tensor_scatter(cache: Any, update: Any, write_indices: Any) -> Any:
    return op.TensorScatter(cache, update, write_indices, axis=2)


def _masked_attention(query: Any, key: Any, value: Any, mask: Any, scale: float, softcap: float) -> Any:
    if softcap:  # the attribute at all is what TensorRT refuses
        return _first(op.Attention(query, key, value, mask, scale=scale, softcap=softcap))
    return _first(op.Attention(query, key, value, mask, scale=scale))


def _causal_attention(query: Any, key: Any, value: Any, scale: float, softcap: float) -> Any:
    if softcap:
        return _first(op.Attention(query, key, value, is_causal=1, scale=scale, softcap=softcap))
    return _first(op.Attention(query, key, value, is_causal=1, scale=scale))


def _rotary(x: Any, cos: Any, sin: Any) -> Any:
    head, rotated = x.shape[-1], 2 * cos.shape[-1]
    return op.RotaryEmbedding(x, cos, sin, rotary_embedding_dim=0 if head == rotated else rotated)


def _tied_head(x: Any, embedding: Any) -> Any:
    # Gemm reads the table as it lies, so that a tied embedding is stored once; Gemm takes matrices only.
    width = op.Shape(x, start=2, end=3)
    leading = op.Shape(x, start=0, end=2)
    rows = op.Reshape(x, op.Concat(op.Constant(value_ints=[-1]), width, axis=0))
    logits = op.Gemm(rows, embedding, transB=1)
    return op.Reshape(logits, op.Concat(leading, op.Constant(value_ints=[-1]), axis=0))


TRANSLATION: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.tformer.tensor_scatter.default: _tensor_scatter,
    torch.ops.tformer.masked_attention.default: _masked_attention,
    torch.ops.tformer.causal_attention.default: _causal_attention,
    torch.ops.tformer.rotary.default: _rotary,
    torch.ops.tformer.tied_head.default: _tied_head,
}
