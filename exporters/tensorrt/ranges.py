"""Which values inside a model would not fit fp16, found by running its graph on prompts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx

from tformer_deploy.backends.watched import WatchedGraph
from tformer_deploy.bundle.quantization import CALIBRATION
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, cache_names
from tformer_deploy.exporters.tensorrt.graph import name_by_layer
from tformer_deploy.parity.plan import make_plan
from tformer_deploy.parity.quantised_weights import calibration_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import ModelConfig

FP16_MOST = 65504.0
# Other prompts reach further than these: a value that comes this close is named too.
_MARGIN = 4.0
# Every watched value of a row is in memory at once, so rows are short.
PIECE = 128
# What can grow: products, sums and norms. Everything else passes values on, or makes them smaller.
_GROWING = ("MatMul", "Gemm", "Add", "Mul", "Attention", "RMSNormalization", "LayerNormalization")
_NAMED = 8
# Of a calibration as much is run as takes seconds: on one core about 4 s a 100 million parameters.
CALIBRATION_TOKENS = 2048


@dataclass(frozen=True)
class Prompts:
    """What a scan runs.

    Attributes:
        rows: Ids.
        kind: What they are, for a reader: ``tokens of the prompts given``.
        caution: What a reader must know of them; empty where they are real.
    """

    rows: Sequence[tuple[int, ...]]
    kind: str = "tokens of the prompts given"
    caution: str = ""


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
        beyond: Values that do not fit fp16, in the order of the graph: the first is where an overflow begins.
        near: Values that come within a quarter of its end, largest first.
        kind: What was run, see :class:`Prompts`.
        caution: What a reader must know of it.
    """

    tokens: int
    values: int
    largest: Reach
    beyond: tuple[Reach, ...]
    near: tuple[Reach, ...]
    kind: str = "tokens of the prompts given"
    caution: str = ""

    @property
    def first(self) -> str:
        """Where an overflow begins: the first values that do not fit fp16."""
        return _list(self.beyond)

    @property
    def sentences(self) -> tuple[str, ...]:
        """For a reader."""
        done = f"range scan: {self.values} values inside the model on {self.tokens:,} {self.kind}"
        largest = f": the largest is {self.largest.most:,.0f} ({self.largest.place}); fp16 ends at {FP16_MOST:,.0f}"
        fits = not self.beyond and not self.near
        found = [f"{done}{largest if fits else ''}{f'. {self.caution}' if self.caution else ''}"]
        if self.beyond:
            found.append(
                f"WARNING: {len(self.beyond)} values do NOT fit fp16, which ends at {FP16_MOST:,.0f}: {_list(_largest_first(self.beyond))}. "
                "Give --dtype bf16."
            )
        if self.near:
            found.append(
                f"WARNING: {len(self.near)} values come close to the end of fp16: {_list(self.near)}. Consider --dtype bf16."
            )
        return tuple(found)


def prompts_for(bundle: Bundle, given: Sequence[tuple[int, ...]]) -> Prompts:
    """The best prompts that there are: those given, the ones that a quantised bundle was rounded for, random tokens.

    Raises:
        InputError: The bundle's calibration is damaged.
    """
    if given:
        return Prompts(given)
    if rows := calibration_of(bundle):
        total = sum(map(len, rows))
        return Prompts(_spread(rows), f"of the {total:,} tokens that the weights were rounded for ({CALIBRATION})")
    return compared_prompts(bundle)


def compared_prompts(bundle: Bundle) -> Prompts:
    """The rows that graphs in two dtypes are compared on; they are random, for a model is compared without a text."""
    plan = make_plan(bundle.manifest.config, bundle.manifest.max_length, "quick")
    return Prompts(
        plan.rows,
        "random tokens",
        "Random tokens are no real prompts, which may reach further: give some with --range-scan FILE.",
    )


def scan_ranges(bundle: Bundle, prompts: Prompts) -> RangeScan:
    """Runs the prefill graph on ONNX Runtime with every value that can grow looked at.

    Args:
        bundle: In fp32, so that nothing overflows on the way; in fp16 an overflow is infinite.
        prompts: Each row is run in pieces.

    Raises:
        InputError: ONNX Runtime cannot run the graph.
    """
    places = _growing(bundle.prefill_path)
    most = largest_magnitudes(bundle, list(places), prompts.rows)
    reached = [Reach(places[name], value) for name, value in most.items()]
    beyond = tuple(reach for reach in reached if reach.most > FP16_MOST)
    near = _largest_first(reach for reach in reached if FP16_MOST / _MARGIN < reach.most <= FP16_MOST)
    tokens = sum(map(len, prompts.rows))
    return RangeScan(tokens, len(places), _largest_first(reached)[0], beyond, near, prompts.kind, prompts.caution)


def largest_magnitudes(bundle: Bundle, names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """How far values of the prefill graph go on ONNX Runtime; infinite where one is not finite, 0 where the graph has none of that name.

    Args:
        bundle: Whose graph.
        names: Of the values.
        rows: Ids; each row is run in pieces.

    Raises:
        InputError: ONNX Runtime cannot run the graph.
    """
    most = dict.fromkeys(names, 0.0)
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as scratch:
        graph = WatchedGraph(bundle, "prefill", names, Path(scratch))
        for piece in (row[start : start + PIECE] for row in rows for start in range(0, len(row), PIECE)):
            values = graph.run(prefill_inputs(graph.config, piece, graph.cache_dtype))
            for name in values.keys() & most.keys():
                most[name] = max(most[name], _magnitude(values[name]))
    return most


def _spread(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Rows at even distances, :data:`CALIBRATION_TOKENS` ids at most; the last one is cut."""
    step, kept, room = -(-sum(map(len, rows)) // CALIBRATION_TOKENS), [], CALIBRATION_TOKENS
    for row in rows[::step]:
        if piece := row[:room]:
            kept.append(piece)
        room -= len(piece)
    return kept


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


def prefill_inputs(config: ModelConfig, ids: tuple[int, ...], dtype: DTypeLike) -> dict[str, NDArray[np.generic]]:
    """Inputs of a prefill graph for one row, whose last logits are asked for; its caches are given in ``dtype``."""
    shape = (1, config.n_kv_heads, len(ids), config.head_dim)
    return {
        INPUT_IDS: np.array([ids], dtype=np.int64),
        LOGIT_POSITIONS: np.array([[len(ids) - 1]], dtype=np.int64),
        **{name: np.zeros(shape, dtype) for name in cache_names(config.n_layers, "past_key_values")},
    }


def _magnitude(array: NDArray[np.generic]) -> float:
    """Largest magnitude; infinite where a value is not finite."""
    values = np.abs(array.astype(np.float32, copy=False))
    largest = float(values.max(initial=0.0))
    return largest if np.isfinite(largest) else float("inf")


def _largest_first(reaches: Iterable[Reach]) -> tuple[Reach, ...]:
    return tuple(sorted(reaches, key=lambda reach: (-reach.most, reach.place)))


def _list(reaches: tuple[Reach, ...]) -> str:
    return ", ".join(_named(reaches)) + (f" and {len(reaches) - _NAMED} more" if len(reaches) > _NAMED else "")


def _named(reaches: tuple[Reach, ...]) -> Iterator[str]:
    for reach in reaches[:_NAMED]:
        yield f"{reach.place} reaches {reach.most:,.0f}"
