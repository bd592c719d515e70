"""The first place where a graph and the reference part: ``check --bisect``.

Values inside a graph become outputs of a copy of it that lies in memory alone. The decode graph starts from the reference's
own caches, so that what it does wrong is its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.backends.watched import WatchedGraph
from tformer_deploy.bundle.signature import (
    ATTENTION_OUTPUT,
    BLOCK_OUTPUT,
    BLOCKS_INPUT,
    INPUT_IDS,
    LOGIT_POSITIONS,
    LOGITS,
    PAST_LENGTHS,
    PHASES,
    cache_names,
)
from tformer_deploy.errors import InputError
from tformer_deploy.interrupts import collect_garbage
from tformer_deploy.parity.bisection import Bisection, Run, Station
from tformer_deploy.parity.inside import Inside, look_inside
from tformer_deploy.parity.metrics import worse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.parity.plan import Plan
    from tformer_deploy.reference import Decoder

# Rows of the plan that are looked at: different lengths, one of a single token.
_ROWS = 3
# A station parts where its error is above this multiple of what the reference's own rounding does there …
_NOISE = 8.0
# … and above this, a few units of rounding.
_FLOOR = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}


def bisect(bundle: Bundle, reference: Callable[[], Decoder], plan: Plan) -> Bisection:
    """Runs both graphs on a few rows with everything at the seams of the blocks looked at.

    Args:
        bundle: The bundle.
        reference: Loads the reference in float32; it is freed before the runtime is loaded.
        plan: The rows.
    """
    rows, lengths = plan.rows[:_ROWS], plan.lengths[:_ROWS]
    inside = look_inside(reference(), rows, bundle.manifest.dtype)
    collect_garbage()
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as folder:
        for phase in PHASES:
            widths = {"prefill": [0], "decode": [w for w in dict.fromkeys((1, plan.steps)) if w]}[phase]
            names = {0: "prefill", 1: "decode, one token"}
            try:
                graph = WatchedGraph(bundle, phase, _watched(bundle), Path(folder))
                for width in widths:
                    runs.append(_run(graph, names.get(width, "decode, several tokens"), inside, rows, lengths, width))
            except InputError as e:
                runs.append(Run(phase, (), failure=str(e)[:500]))
    return Bisection(tuple(runs))


def _watched(bundle: Bundle) -> list[str]:
    layers = range(bundle.manifest.config.n_layers)
    return [BLOCKS_INPUT, *(name.format(layer=i) for i in layers for name in (ATTENTION_OUTPUT, BLOCK_OUTPUT))]


def _run(
    graph: WatchedGraph,
    name: str,
    inside: Inside,
    rows: Sequence[tuple[int, ...]],
    lengths: Sequence[int],
    width: int,
) -> Run:
    """One run; ``width`` 0 prefills the prompts, otherwise so many tokens are decoded after them."""
    starts = [0] * len(rows) if graph.phase == "prefill" else list(lengths)
    ends = list(lengths) if graph.phase == "prefill" else [n + width for n in lengths]
    found = graph.run(_inputs(graph, inside, rows, starts, ends))
    stations = []
    for order, (station, value, layer, half) in enumerate(_places(graph.config.n_layers)):
        if value not in found:
            continue
        error, line = 0.0, _FLOOR[graph.dtype]
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            # A cache holds the past too, which must stay as it was.
            first = 0 if value.startswith("present.") else start
            for part in _parts(value):
                wanted, noise = inside.values[part][row][first:end], inside.noise[part][row][first:end]
                have = _of_row(found[part], row, first, end, start)
                error = worse(error, _distance(wanted, have))
                line = max(line, _NOISE * _distance(wanted, noise))
        stations.append(Station(order, station, value, layer, half, error, line))
    missing = tuple(n for n in graph.wanted if n not in found)
    return Run(name, tuple(stations), missing)


def _inputs(
    graph: WatchedGraph, inside: Inside, rows: Sequence[tuple[int, ...]], starts: Sequence[int], ends: Sequence[int]
) -> dict[str, NDArray[np.generic]]:
    """What the graph is given: caches that hold the reference's own keys and values before ``starts``."""
    config, capacity = graph.config, max(map(len, rows))
    width = max(end - start for start, end in zip(starts, ends, strict=True))
    ids = np.zeros((len(rows), width), dtype=np.int64)
    for i, (row, start, end) in enumerate(zip(rows, starts, ends, strict=True)):
        ids[i, : end - start] = row[start:end]
    everywhere = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
    inputs: dict[str, NDArray[np.generic]] = {INPUT_IDS: ids, LOGIT_POSITIONS: everywhere}
    if graph.phase == "decode":
        inputs[PAST_LENGTHS] = np.array(starts, dtype=np.int64)
    pairs = zip(cache_names(config.n_layers, "past_key_values"), cache_names(config.n_layers, "present"), strict=True)
    for past, present in pairs:
        cache = np.zeros((len(rows), config.n_kv_heads, capacity, config.head_dim), graph.cache_dtype)
        for i, n in enumerate(starts):
            known = inside.values[present][i][:n].reshape(n, config.n_kv_heads, config.head_dim)
            cache[i, :, :n] = known.swapaxes(0, 1)
        inputs[past] = cache
    return inputs


def _places(n_layers: int) -> Iterator[tuple[str, str, int | None, str | None]]:
    """Name, value, layer and half of every station."""
    yield "the input of layer 0", BLOCKS_INPUT, None, None
    for i in range(n_layers):
        yield f"what layer {i} caches", f"present.{i}.key", i, "attention"
        yield f"the attention output of layer {i}", ATTENTION_OUTPUT.format(layer=i), i, "attention"
        yield f"the output of layer {i}", BLOCK_OUTPUT.format(layer=i), i, "feed-forward"
    yield "the logits", LOGITS, None, None


def _parts(value: str) -> tuple[str, ...]:
    """A cache is a key and a value."""
    return (value, value.removesuffix("key") + "value") if value.startswith("present.") else (value,)


def _of_row(array: NDArray[np.generic], row: int, first: int, end: int, start: int) -> NDArray[np.float64]:
    """Positions ``first … end - 1`` of a row as [S, width], from [B, S, width] or from caches [B, K, C, D]."""
    if row >= len(array):  # a graph that lost a row: no position of it is right
        return np.empty((0, 0))
    if array.ndim == 4:
        slots = array[row, :, first:end].swapaxes(0, 1)
        return slots.reshape(end - first, -1).astype(np.float64)
    return array[row, first - start : end - start].astype(np.float64)


def _distance(wanted: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    """Largest over positions of |found - wanted| / |wanted|; NaN where a value is not finite, or of another shape."""
    if wanted.shape != found.shape or not (np.isfinite(wanted).all() and np.isfinite(found).all()):
        return float("nan")
    sizes, errors = np.linalg.norm(wanted, axis=1), np.linalg.norm(found - wanted, axis=1)
    return float((errors / np.where(sizes > 0, sizes, 1.0)).max(initial=0.0))
