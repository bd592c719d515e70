"""What TensorRT can build: which attention it can fuse, known from the model alone. The limits were measured on TensorRT-RTX 1.7.

Windows and ALiBi fuse: their masks are computed in the graph. A soft cap does not, nor do some head sizes and dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tformer_deploy.bundle.quantization import Quantization
    from tformer_deploy.config import DType, ModelConfig

# Cache slots of a row where nothing is asked for.
DEFAULT_CAPACITY = 4096
# The decode kernel keeps a row's scores and one head in shared memory: capacity + head_dim values, as measured to the slot.
_SCORES = {"fp16": 24576, "bf16": 24576, "fp32": 12288}


def unfusable(config: ModelConfig, dtype: DType, capacity: int) -> list[tuple[str, str]]:
    """Why the attention of a phase cannot fuse, and what to do about it; empty where all can."""
    faults, dim = [], config.head_dim
    if config.attention_softcap is not None:
        faults.append(
            (
                f"prefill and decode: attention scores are capped at {config.attention_softcap:g}; TensorRT takes no cap.",
                _ONNX_RUNTIME,
            )
        )
    if dim % 8 or not 8 <= dim <= 256:
        faults.append(
            (f"prefill and decode: head_dim is {dim}; fused kernels take multiples of 8 from 16 to 256.", _ONNX_RUNTIME)
        )
    elif dim < 16:
        faults.append(
            (f"prefill: head_dim is {dim}; fused kernels take multiples of 8 from 16 to 256 (decode: from 8).", _ONNX_RUNTIME)
        )
    if dtype == "fp32":
        faults.append(("prefill: the dtype is fp32; fused kernels take fp16 and bf16 (decode: fp32 too).", "Give --dtype fp16."))
    limit = _SCORES[dtype] - dim
    if capacity > limit:
        faults.append(
            (
                f"decode: capacity is {capacity}; for head_dim {dim} in {dtype} the kernel ends at {limit}.",
                f"Give --capacity {limit} or less.",
            )
        )
    return faults


def no_engine(quantization: Quantization | None) -> tuple[str, str] | None:
    """Why no engine can be made of matrices stored so, and what to do about it; None where one can."""
    if quantization is None or not quantization.dynamic:
        return None
    return (
        f"matrices are {quantization.kind}: its graphs multiply whole numbers (MatMulInteger), which TensorRT has no operator for.",
        "Run this bundle on ONNX Runtime; for an engine, export the checkpoint with --quantize int8 or int4.",
    )


_ONNX_RUNTIME = "Run this bundle on ONNX Runtime; no engine can be made of it."
