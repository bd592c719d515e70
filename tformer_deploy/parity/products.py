"""Every product of an int8-dynamic graph by itself: what it makes of the rows that really reach it, against PyTorch.

Rounding is chaotic across layers: a difference in the last bit moves one value of a row to the next level, and some layers
later two right computations are as far apart as rounding itself is from the truth. Within one product nothing is: its sums are
exact, and everything else is a handful of float32 operations. So the graphs are proven in two halves that leave nothing out:
here each product as deployed, from the row before rounding to the result; and everything else, with exact products in their
place, under the lines of fp32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tformer_deploy.backends.dynamic import find_products
from tformer_deploy.backends.watched import WatchedGraph
from tformer_deploy.bundle.quantization import scale_name
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, PAST_LENGTHS, PHASES, cache_names
from tformer_deploy.errors import InputError
from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.parity.metrics import worse
from tformer_deploy.quantization.rows import round_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.parity.plan import Plan

# The two scales may be multiplied in any order: one rounding more or less in float32, 6e-8 each.
LINE = 5e-7
# Rows that are looked at, of different lengths: one has padding.
_ROWS = 2
# Outputs that are computed together in float64.
_OUTPUTS = 8192


def compare_products(bundle: Bundle, plan: Plan) -> list[Check]:
    """Both graphs as deployed, over the first rows of the plan and one step after them."""
    import onnx

    config, checks = bundle.manifest.config, []
    rows, lengths = plan.rows[:_ROWS], plan.lengths[:_ROWS]
    shape = (len(rows), config.n_kv_heads, max(lengths) + 1, config.head_dim)
    caches: dict[str, NDArray[np.generic]] = {
        name: np.zeros(shape, np.float32) for name in cache_names(config.n_layers, "past_key_values")
    }
    for phase in PHASES:
        group = f"int8 products, {phase}"
        try:
            proto = onnx.load(bundle.path / f"{phase}.onnx", load_external_data=False)
            products = find_products(proto.graph, bundle)
            del proto
            wanted = [name for product in products for name in (product.rows, product.result)]
            with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as folder:
                graph = WatchedGraph(bundle, phase, list(dict.fromkeys(wanted)), Path(folder), exact=False)
            inputs = caches | _inputs(phase, rows, lengths)
            found = graph.run(inputs)
        except InputError as e:
            checks.append(judge(group, "ran to the end", 0, 1, "==", str(e)[:500]))
            continue
        caches = {n.replace("present", "past_key_values", 1): array for n, array in found.items() if n.startswith("present.")}
        largest, name = 0.0, ""
        for product in products:
            error = _error(bundle, product.matrix, found[product.rows], found[product.result])
            if worse(largest, error) != largest:
                largest, name = worse(largest, error), product.matrix
        checks.append(judge(group, "products compared", len(products), 1, ">="))
        checks.append(judge(group, "largest relative error", largest, LINE, "<=", name))
    return checks


def _inputs(phase: str, rows: tuple[tuple[int, ...], ...], lengths: tuple[int, ...]) -> dict[str, NDArray[np.generic]]:
    """The prompts, or the token after each."""
    if phase == "decode":
        new = np.array([[row[n]] for row, n in zip(rows, lengths, strict=True)], np.int64)
        return {INPUT_IDS: new, LOGIT_POSITIONS: np.zeros_like(new), PAST_LENGTHS: np.array(lengths, np.int64)}
    ids = np.zeros((len(rows), max(lengths)), np.int64)
    for i, n in enumerate(lengths):
        ids[i, :n] = rows[i][:n]
    return {INPUT_IDS: ids, LOGIT_POSITIONS: np.array([[n - 1] for n in lengths], np.int64)}


def _error(bundle: Bundle, matrix: str, rows: NDArray[np.generic], result: NDArray[np.generic]) -> float:
    """Largest relative error of a product's values; 0 where both are 0, NaN where one is not finite or shapes differ."""
    weight, scales = torch.from_numpy(bundle.tensor(matrix)), torch.from_numpy(bundle.tensor(scale_name(matrix)))
    x, found = torch.from_numpy(rows), torch.from_numpy(result)
    if (*x.shape[:-1], weight.shape[1]) != tuple(found.shape) or x.shape[-1] != len(weight):
        return float("nan")
    values, steps = round_rows(x, len(weight))
    whole, largest = values.flatten(-2).double(), 0.0
    for first in range(0, weight.shape[1], _OUTPUTS):
        part = slice(first, first + _OUTPUTS)
        sums = (whole @ weight[:, part].double()).float()  # whole numbers below 2^53, and so exact
        want, have = sums * (steps.flatten(-2) * scales[0, part]), found[..., part]
        error = torch.where(want == have, 0.0, (have - want).abs() / want.abs())
        largest = worse(largest, float(error.max()))
    return largest
