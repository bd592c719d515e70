"""What TensorRT can build: which attention it can fuse, known from the model alone. The limits were measured on TensorRT-RTX 1.7.

Windows and ALiBi fuse: their masks are computed in the graph. A soft cap does not, nor do some head sizes and dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tformer_deploy.bundle.bundle import Bundle
    from tformer_deploy.bundle.quantization import Quantization
    from tformer_deploy.config import DType, ModelConfig

# Cache slots of a row where nothing is asked for.
DEFAULT_CAPACITY = 4096
# The decode kernel keeps a row's scores and one head in shared memory: capacity + head_dim values, as measured to the slot.
_SCORES = {"fp16": 24576, "bf16": 24576, "fp32": 12288}
# Query heads that the decode kernel wants at least, as measured: 1, 2 and 3 do not fuse.
_HEADS = 4
_ONE, _SEVERAL = ("decode",), ("prefill", "extend")
_ALL = (*_SEVERAL, *_ONE)
_ONNX_RUNTIME = "Run this bundle on ONNX Runtime, or give --allow-decomposed for an engine whose attention is not fused."


@dataclass(frozen=True)
class Unfusable:
    """Why the attention of some phases cannot fuse.

    Attributes:
        phases: ``decode`` (one new token a row), ``prefill`` and ``extend`` (several).
        reason: What was found, and what fused kernels take.
        cure: What to do about it.
    """

    phases: tuple[str, ...]
    reason: str
    cure: str


@dataclass(frozen=True)
class PhaseReport:
    """What will become of the attention of one phase.

    Attributes:
        phase: ``decode``, ``prefill`` or ``extend``.
        subject: Number of attentions, dtype, head dim, slots, mask.
        faults: Why they cannot fuse; empty where all will.
    """

    phase: str
    subject: str
    faults: tuple[Unfusable, ...]

    @property
    def sentence(self) -> str:
        """One line for a reader."""
        if not self.faults:
            return f"{self.phase}: {self.subject}: will fuse"
        return f"{self.phase}: {self.subject}: CANNOT FUSE: {' '.join(f.reason for f in self.faults)}"


def attention_faults(config: ModelConfig, dtype: DType, capacity: int) -> Iterator[Unfusable]:
    """Everything that keeps a fused kernel away from the attention of some phase."""
    dim = config.head_dim
    if config.attention_softcap is not None:
        yield Unfusable(
            _ALL, f"attention scores are capped at {config.attention_softcap:g}; TensorRT takes no cap.", _ONNX_RUNTIME
        )
    if dim % 8 or not 8 <= dim <= 256:
        yield Unfusable(_ALL, f"head_dim is {dim}; fused kernels take multiples of 8 from 16 to 256.", _ONNX_RUNTIME)
    elif dim < 16:
        yield Unfusable(
            _SEVERAL,
            f"head_dim is {dim}; fused kernels take multiples of 8 from 16 to 256 (decode: from 8).",
            "Give --layout decode, which has no prefill profile, or run this bundle on ONNX Runtime.",
        )
    if dtype == "fp32":
        yield Unfusable(
            _SEVERAL,
            "the dtype is fp32 (that of attention, also where matrices are quantised); fused kernels take fp16 and bf16 (decode: fp32 too).",
            "Give --dtype fp16, or --layout decode for a plan that only decodes.",
        )
    if config.n_heads < _HEADS:
        yield Unfusable(
            _ONE, f"the model has {config.n_heads} query heads; the fused kernel takes {_HEADS} or more.", _ONNX_RUNTIME
        )
    limit = _SCORES[dtype] - dim
    if capacity > limit:
        yield Unfusable(
            _ONE,
            f"capacity is {capacity}; for head_dim {dim} in {dtype} the kernel ends at {limit}.",
            f"Give --capacity {limit} or less.",
        )


def preflight(config: ModelConfig, dtype: DType, capacity: int, phases: Sequence[str], square: bool = False) -> list[PhaseReport]:
    """Which attention will fuse, phase by phase, before a builder starts.

    Args:
        config: The model.
        dtype: The engine's.
        capacity: Cache slots of a row.
        phases: Those that will be built.
        square: The prefill phase attends to the fresh keys and values alone, not to the cache.
    """
    faults = list(attention_faults(config, dtype, capacity))
    reports = []
    for phase in phases:
        fresh = square and phase == "prefill"
        over = "the prompt's own keys" if fresh else f"{capacity} cache slots"
        subject = f"{config.n_layers} attentions, {dtype}, head_dim {config.head_dim}, over {over}, {_mask(config, fresh)}"
        reports.append(PhaseReport(phase, subject, tuple(f for f in faults if phase in f.phases)))
    return reports


def _mask(config: ModelConfig, fresh: bool) -> str:
    plain = "causal flag" if fresh else "mask computed in the graph"
    if config.positions == "alibi":
        return "mask with ALiBi computed in the graph"
    if config.window_layers:
        return f"{plain} ({len(config.window_layers)} of them a window of {config.window}, mask computed in the graph)"
    return plain


def unfusable(config: ModelConfig, dtype: DType, capacity: int) -> list[tuple[str, str]]:
    """Why the attention of prefill or decode cannot fuse, and what to do about it; empty where all can."""
    found = []
    for fault in attention_faults(config, dtype, capacity):
        where = " and ".join(phase for phase in ("prefill", "decode") if phase in fault.phases)
        found.append((f"{where}: {fault.reason}", fault.cure))
    return found


def build_command(bundle: Bundle) -> str:
    """The command that makes an engine of a bundle: an fp32 one needs another dtype, since no prompt fuses in fp32."""
    return f"tformer-deploy build-engine {bundle.path}{' --dtype fp16' if bundle.manifest.dtype == 'fp32' else ''}"


def no_engine(quantization: Quantization | None, cast: bool) -> tuple[str, str] | None:
    """Why no engine can be made of matrices stored so, and what to do about it; None where one can.

    Args:
        quantization: The bundle's.
        cast: The engine's dtype is another one than the bundle's: its graph is derived, in which rows are not rounded.
    """
    if quantization is None or not quantization.dynamic or cast:
        return None
    return (
        f"matrices are {quantization.kind}: its graphs multiply whole numbers (MatMulInteger), which TensorRT has no operator for.",
        "Give --dtype fp16 or bf16: the graph is then derived, with the same matrices and rows that are not rounded.",
    )


def unpacking(quantization: Quantization | None) -> str | None:
    """Why no kernel of TensorRT reads such matrices as they are stored; None where one does.

    Measured on TensorRT-RTX 1.7: int4 is multiplied as it is stored in blocks, and unpacked with one scale an output; int8 is
    the other way round.
    """
    if quantization is None or "int8" not in (quantization.kind, quantization.head):
        return None
    some = "int8 matrices" if quantization.kind == "int8" else "the int8 head"
    return (
        f"{some} in blocks of {quantization.block} will be UNPACKED to memory at each step: TensorRT multiplies int8 as it is stored "
        "only with one scale an output. That moves 5 bytes a weight where fp16 moves 2: export with --quantize int4 or int8-dynamic."
    )
