"""FP8 products: each block's matrices, and the rows that they multiply, rounded to 8-bit floating-point numbers (E4M3).

Standard operators only: QuantizeLinear and DequantizeLinear around both sides of a MatMul, from which TensorRT makes one FP8
product. Rows have one scale, measured on prompts beforehand; matrices one for each output. TensorRT rounds the matrices when
it builds, so the weights beside the graphs stay as they are. The head keeps the engine's dtype: rounding it costs most.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from ml_dtypes import bfloat16
from onnx import TensorProto, helper, numpy_helper

from tformer_deploy.backends.bf16 import write_fp32_graphs
from tformer_deploy.backends.graph import import_runtime
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle.quantization import HEAD, is_matrix
from tformer_deploy.bundle.seal import seal
from tformer_deploy.bundle.signature import LOGIT_POSITIONS, PHASES
from tformer_deploy.errors import InputError
from tformer_deploy.exporters.tensorrt.preflight import fp8_file
from tformer_deploy.exporters.tensorrt.ranges import PIECE, largest_magnitudes, prefill_inputs
from tformer_deploy.interrupts import collect_garbage
from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.parity.metrics import compare_logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.bundle.engine_record import DerivedGraph

    Row = tuple[int, ...]

# The largest number of E4M3.
LARGEST = 448.0
# Every so many rows one is kept for the comparison, and not measured on.
_KEPT = 4
# Tokens that are compared at most; on a CPU both sides multiply in float32 or slower.
_COMPARED = 1024
_DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(bfloat16)}
# What rounding costs depends on the model: the line is what the same rounding costs in PyTorch, times this, for two right ways
# to round differ in the last bit, and so in many values after some layers. What it costs is told, and is the user's to judge.
SAME_ROUNDING, LEAST_LINE = 2.0, 1e-6
MARGIN = 0.1


@dataclass(frozen=True)
class SplitRows:
    """Rows of ids, split: scales are measured on some, and the outcome is compared on others.

    Attributes:
        measured: Rows that scales are measured on.
        compared: Rows that are compared, every fourth; the same ones where there is but one.
    """

    measured: tuple[Row, ...]
    compared: tuple[Row, ...]


def add_fp8_graphs(
    bundle: Bundle, derived: Bundle, record: DerivedGraph, rows: Sequence[Row], say: Callable[[str], None]
) -> DerivedGraph:
    """Writes graphs with FP8 products beside those of ``derived``, and compares what they compute with the bundle's.

    Args:
        bundle: In fp32.
        derived: The same in fp16 or bf16.
        record: What is known of ``derived``.
        rows: Ids of real prompts.
        say: Called with a few words at the start of each part.

    Returns:
        The record, with what the comparison found.

    Raises:
        InputError: The outcome is too far from the bundle's.
    """
    prompts = split_rows(rows)
    say("scales of fp8")
    largest = measure_rows(bundle, prompts.measured)
    write_fp8_graphs(derived, largest)
    derived, _ = seal(derived.path)  # the graphs are files of that bundle from now on
    say("fp8 graph against the fp32 one")
    checks = compare_fp8(bundle, derived, largest, prompts.compared)
    if red := [c for c in checks if c.verdict == "red"]:
        lines = "\n  ".join(f"{c.group}, {c.metric}: {c.value:.3g}, gate {c.relation} {c.gate:g}" for c in red)
        raise InputError(
            f"The FP8 graph is further from the bundle than rounding explains:\n  {lines}",
            "Build without --fp8; report this.",
        )
    tokens = sum(map(len, prompts.measured))
    found = ", ".join(f"{c.metric}: {c.value:.3g}" for c in checks)
    note = (
        f"FP8: scales of rows fit {tokens} tokens of prompts; on {checks[0].detail} of others, against the fp32 graph: {found}. "
        "ONNX Runtime computed that; no GPU did."
    )
    gated = {f"{c.group}: {c.metric}": (float(c.value), float(c.gate)) for c in checks if c.gate is not None}
    return replace(
        record,
        core_sha256=derived.core_sha256,
        checks=record.checks + len(gated),
        figures=record.figures | gated,
        notes=(*record.notes, note),
    )


def split_rows(rows: Sequence[Row]) -> SplitRows:
    """Every fourth row is kept for the comparison."""
    if len(rows) < 2:
        return SplitRows(tuple(rows), tuple(rows))
    compared = tuple(rows[_KEPT - 1 :: _KEPT]) or tuple(rows[-1:])
    measured = tuple(row for i, row in enumerate(rows) if i % _KEPT != _KEPT - 1)
    return SplitRows(measured if len(measured) < len(rows) else tuple(rows[:-1]), compared)


def measure_rows(bundle: Bundle, rows: Sequence[Row]) -> dict[str, float]:
    """Largest magnitude of what each matrix of a block multiplies, by the matrix's name.

    Args:
        bundle: In fp32.
        rows: Ids of real prompts.

    Raises:
        InputError: ONNX Runtime cannot run the graph, or a value is not finite.
    """
    read = dict(_products(onnx.load(bundle.prefill_path, load_external_data=False).graph))
    most = largest_magnitudes(bundle, sorted(set(read.values())), rows)
    largest = {matrix: most[value] for matrix, value in read.items()}
    if odd := [matrix for matrix, value in largest.items() if not np.isfinite(value)]:
        raise InputError(f"What {odd[0]} multiplies is not finite on these prompts.", "Run `tformer-deploy check` on the bundle.")
    return largest


def write_fp8_graphs(bundle: Bundle, largest: dict[str, float]) -> None:
    """Writes both graphs of a bundle with FP8 products into its folder; they read the bundle's own weights.

    Args:
        bundle: In fp16 or bf16.
        largest: From :func:`measure_rows`.
    """
    dtype = _DTYPES[bundle.manifest.dtype]
    for phase in PHASES:
        proto = onnx.load(bundle.path / f"{phase}.onnx", load_external_data=False)
        _round_products(proto.graph, bundle, largest, dtype)
        (bundle.path / fp8_file(phase)).write_bytes(proto.SerializeToString(deterministic=True))


def compare_fp8(bundle: Bundle, derived: Bundle, largest: dict[str, float], rows: Sequence[Row]) -> list[Check]:
    """The prefill graph with FP8 products on ONNX Runtime, and PyTorch with the same rounding, against the bundle's own graph.

    Args:
        bundle: In fp32.
        derived: In fp16 or bf16, with FP8 graphs.
        largest: From :func:`measure_rows`.
        rows: Ids that no scale was measured on.
    """
    taken = [row[:PIECE] for row in rows][: max(1, _COMPARED // PIECE)]
    wanted = list(_logits(bundle, bundle.prefill_path, taken))
    collect_garbage()
    found = list(_fp8_logits(derived, taken))
    collect_garbage()
    rounded = compare_logits(wanted, list(_rounded_logits(bundle, largest, _DTYPES[derived.manifest.dtype], taken)), MARGIN)
    metrics = compare_logits(wanted, found, MARGIN)
    line = max(LEAST_LINE, SAME_ROUNDING * rounded.mean_kl)
    group = "fp8 against the bundle, prompts"
    checks = [judge(group, "mean KL", metrics.mean_kl, line, "<=", f"{metrics.positions} positions")]
    if metrics.top1_positions:
        name, detail = f"same top-1, margin ≥ {MARGIN:g}", f"{metrics.top1_positions} positions"
        checks.append(Check(group, name, metrics.top1_agreement, None, ">=", "reported", detail))
    return checks


@torch.inference_mode()
def _rounded_logits(
    bundle: Bundle, largest: dict[str, float], dtype: np.dtype[np.generic], rows: Sequence[Row]
) -> Iterator[NDArray[np.float32]]:
    """The reference in float32, its blocks' matrices and what they multiply rounded as the FP8 graphs round them."""
    decoder = bundle_backend(bundle).decoder
    for matrix, most in largest.items():
        linear = decoder.get_submodule(matrix.removesuffix(".weight"))
        weight = linear.get_parameter("weight")
        per_output = torch.from_numpy(_steps(weight.abs().amax(0).numpy(), dtype).astype(np.float32))
        weight.copy_(_to_fp8(weight, per_output))
        step = torch.from_numpy(_steps(np.array(most, np.float32), dtype).astype(np.float32))
        linear.register_forward_pre_hook(lambda _, args, step=step: (_to_fp8(args[0], step), *args[1:]))
    for row in rows:
        yield decoder(torch.tensor([row]))[0].numpy()


def _to_fp8(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """X on the grid of E4M3 under a scale; what lies beyond its end becomes the end."""
    return (x / step).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype) * step


def _steps(largest: NDArray[np.float32], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Scales under which the largest values just fit, in the engine's dtype."""
    # Where everything is zero any scale does; the smallest one that the dtype holds stands for smaller ones.
    least = np.float32(np.nextafter(np.zeros((), dtype), np.ones((), dtype)))
    return np.where(largest > 0, np.maximum(largest / np.float32(LARGEST), least), np.float32(1.0)).astype(dtype)


def _products(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Matrix and what it multiplies, of every product of a block."""
    for node in graph.node:
        if node.op_type == "MatMul" and is_matrix(node.input[1]) and node.input[1] != HEAD:
            yield node.input[1], node.input[0]


def _round_products(graph: onnx.GraphProto, bundle: Bundle, largest: dict[str, float], dtype: np.dtype[np.generic]) -> None:
    nodes, rounded = [], dict[str, str]()
    products = dict(_products(graph))

    def scale(name: str, values: NDArray[np.float32]) -> str:
        graph.initializer.append(numpy_helper.from_array(_steps(values, dtype), name))
        return name

    def around(value: str, name: str, steps: str, axis: int | None) -> str:
        where = {} if axis is None else {"axis": axis}
        last: list[onnx.NodeProto] = [
            helper.make_node("QuantizeLinear", [value, steps], [f"{name}.fp8"], f"{name}.quantize", output_dtype=TensorProto.FLOAT8E4M3FN, **where),
            helper.make_node("DequantizeLinear", [f"{name}.fp8", steps], [f"{name}.dequantized"], f"{name}.dequantize", **where),
        ]  # fmt: skip
        nodes.extend(last)
        return last[-1].output[0]

    for node in graph.node:
        matrix = node.input[1] if len(node.input) > 1 else ""
        if node.op_type == "MatMul" and matrix in products:
            rows = node.input[0]
            if rows not in rounded:
                steps = scale(f"{rows}.scale", np.array(largest[matrix], np.float32))
                rounded[rows] = around(rows, rows, steps, None)
            weights = np.abs(bundle.tensor(matrix).astype(np.float32)).max(axis=0)
            node.input[0] = rounded[rows]
            node.input[1] = around(matrix, matrix, scale(f"{matrix.removesuffix('.weight')}.scale", weights), 1)
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _fp8_logits(derived: Bundle, rows: Sequence[Row]) -> Iterator[NDArray[np.float32]]:
    name = fp8_file("prefill")
    if derived.manifest.dtype != "bf16":
        yield from _logits(derived, derived.path / name, rows)
        return
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as folder:
        write_fp32_graphs(derived, Path(folder), (name,))
        yield from _logits(derived, Path(folder) / name, rows)


def _logits(bundle: Bundle, path: Path, rows: Sequence[Row]) -> Iterator[NDArray[np.float32]]:
    """Of every position of each row, [S, V], from a prefill graph whose weights lie beside it."""
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    # As it is written: a runtime that makes its own kernel of rounded products would round otherwise.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for row in rows:
        inputs = prefill_inputs(bundle.manifest.config, row, np.float16 if bundle.manifest.dtype == "fp16" else np.float32)
        inputs[LOGIT_POSITIONS] = np.arange(len(row), dtype=np.int64)[None]
        yield session.run(["logits"], inputs)[0][0]
