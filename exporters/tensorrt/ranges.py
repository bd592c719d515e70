"""Which values inside a model would not fit fp16, found by running its graph on real prompts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from tformer_deploy.backends.watched import WatchedGraph
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, cache_names
from tformer_deploy.exporters.tensorrt.graph import name_by_layer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tformer_deploy.bundle import Bundle

FP16_MOST = 65504.0
# Other prompts reach further than these: a value that comes this close is named too.
_MARGIN = 4.0
# Every watched value of a row is in memory at once, so rows are short.
_ROW = 128
# What can grow: products, sums and norms. Everything else passes values on, or makes them smaller.
_GROWING = ("MatMul", "Gemm", "Add", "Mul", "Attention", "RMSNormalization", "LayerNormalization")
_NAMED = 8


@dataclass(frozen=True)
class Reach:
    """How far one value goes.

    Attributes:
        place: Our name of the layer and the node's, ``blocks.3.feed_forward/node_mul_139``.
        most: Largest magnitude; infinite where it overflowed already.
    """

    place: str
    most: float


@dataclass(frozen=True)
class RangeScan:
    """What a scan found.

    Attributes:
        tokens: Tokens that were run.
        values: Number of values that were watched.
        largest: The value that goes furthest.
        beyond: Values that do not fit fp16, largest first.
        near: Values that come within a quarter of its end, largest first.
    """

    tokens: int
    values: int
    largest: Reach
    beyond: tuple[Reach, ...]
    near: tuple[Reach, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """For a reader."""
        done = f"range scan: {self.values} values inside the model on {self.tokens} tokens"
        if not self.beyond and not self.near:
            return (f"{done}: the largest is {self.largest.most:,.0f} ({self.largest.place}); fp16 ends at {FP16_MOST:,.0f}",)
        found = [done]
        if self.beyond:
            found.append(
                f"WARNING: {len(self.beyond)} values do NOT fit fp16, which ends at {FP16_MOST:,.0f}: {_list(self.beyond)}. "
                "Give --dtype bf16."
            )
        if self.near:
            found.append(
                f"WARNING: {len(self.near)} values come close to the end of fp16: {_list(self.near)}. Consider --dtype bf16."
            )
        return tuple(found)


def scan_ranges(bundle: Bundle, rows: Sequence[tuple[int, ...]]) -> RangeScan:
    """Runs the prefill graph on ONNX Runtime with every value that can grow looked at.

    Args:
        bundle: In fp32, so that nothing overflows on the way; in fp16 an overflow is infinite.
        rows: Ids of real prompts; each is run in pieces.

    Raises:
        InputError: ONNX Runtime cannot run the graph.
    """
    places = _growing(bundle.prefill_path)
    most = dict.fromkeys(places, 0.0)
    pieces = [row[start : start + _ROW] for row in rows for start in range(0, len(row), _ROW)]
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as scratch:
        graph = WatchedGraph(bundle, "prefill", list(places), Path(scratch))
        for piece in pieces:
            values = graph.run(_inputs(graph, piece))
            for name in places:
                if name in values:
                    most[name] = max(most[name], _magnitude(values[name]))
    reached = sorted((Reach(places[name], value) for name, value in most.items()), key=lambda reach: (-reach.most, reach.place))
    beyond = tuple(reach for reach in reached if reach.most > FP16_MOST)
    near = tuple(reach for reach in reached if FP16_MOST / _MARGIN < reach.most <= FP16_MOST)
    return RangeScan(sum(map(len, pieces)), len(places), reached[0], beyond, near)


def _growing(path: Path) -> dict[str, str]:
    """Output → place of every node inside a block, or of the head, whose value can grow."""
    graph = onnx.load(path, load_external_data=False).graph
    name_by_layer(graph)
    found, inside = {}, False
    for node in graph.node:
        inside = inside or node.name.startswith("blocks.")
        if inside and node.op_type in _GROWING:
            found[node.output[0]] = node.name
    return found


def _inputs(graph: WatchedGraph, ids: tuple[int, ...]) -> dict[str, NDArray[np.generic]]:
    config = graph.config
    shape = (1, config.n_kv_heads, len(ids), config.head_dim)
    caches = {name: np.zeros(shape, graph.cache_dtype) for name in cache_names(config.n_layers, "past_key_values")}
    return {
        INPUT_IDS: np.array([ids], dtype=np.int64),
        LOGIT_POSITIONS: np.array([[len(ids) - 1]], dtype=np.int64),
        **caches,
    }


def _magnitude(array: NDArray[np.generic]) -> float:
    """Largest magnitude; infinite where a value is not finite."""
    values = np.abs(array.astype(np.float32, copy=False))
    largest = float(values.max(initial=0.0))
    return largest if np.isfinite(largest) else float("inf")


def _list(reaches: tuple[Reach, ...]) -> str:
    return ", ".join(_named(reaches)) + (f" and {len(reaches) - _NAMED} more" if len(reaches) > _NAMED else "")


def _named(reaches: tuple[Reach, ...]) -> Iterator[str]:
    for reach in reaches[:_NAMED]:
        yield f"{reach.place} reaches {reach.most:,.0f}"
