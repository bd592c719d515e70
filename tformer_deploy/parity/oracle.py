"""What PyTorch says, computed once and kept as arrays, so that the model can be freed before a runtime is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tformer_deploy.parity.metrics import margin_of, negative_log_likelihood
from tformer_deploy.parity.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.parity.plan import Plan
    from tformer_deploy.reference import Decoder


@dataclass(frozen=True)
class Oracle:
    """The reference's answers to a plan.

    Attributes:
        logits: For each row [n + steps, V], from one full forward pass without a cache, the row alone.
        caches: For each row and layer, key and value [K, n + steps, D] float32.
        greedy: For each of the first two prompts, the greedy tokens and the margin of each.
        edges: For each row at a capacity's edge [1 + steps, V], from the prompt's last position on.
        text: For each window of the text, -log p of every id but the first, float64.
    """

    logits: Sequence[NDArray[np.float32]]
    caches: list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]
    greedy: list[list[tuple[int, float]]]
    edges: list[NDArray[np.float32]] = field(default_factory=list)
    text: list[NDArray[np.float64]] = field(default_factory=list)

    @property
    def not_finite(self) -> int:
        """Values among them that are no finite number."""
        small: list[NDArray[Any]] = [*self.edges, *self.text, *(a for row in self.caches for layer in row for a in layer)]
        rows = (row for logits in self.logits for row in logits)
        return sum(int(array.size - np.isfinite(array).sum()) for array in chain(small, rows))


@torch.inference_mode()
def ask(decoder: Decoder, plan: Plan) -> Oracle:
    """Runs the reference over a plan, row by row."""
    logits, caches = Spool(), []
    for row in plan.rows:
        ids = torch.tensor([row])
        logits.append(decoder(ids)[0].float().numpy())
        caches.append(row_cache(decoder, ids))
    greedy = [_greedy(decoder, row[:n], plan.greedy) for row, n in zip(plan.rows[:2], plan.lengths[:2], strict=True)]
    edges = [_last(decoder, row.ids, row.steps + 1) for row in plan.edges]
    windows = () if plan.text is None else plan.text.windows
    text = [negative_log_likelihood(decoder(torch.tensor([w[:-1]]))[0].float().numpy(), w[1:]) for w in windows]
    return Oracle(logits, caches, greedy, edges, text)


@torch.inference_mode()
def exact(
    decoder: Decoder, plan: Plan
) -> tuple[list[NDArray[np.float32]], list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]]:
    """The same logits and caches in float64, rounded once: how far float32 itself is from the truth.

    Args:
        decoder: The reference in float32; it is converted.
        plan: The rows.
    """
    double = decoder.double()
    rows = [torch.tensor([row]) for row in plan.rows]
    return [double(ids)[0].float().numpy() for ids in rows], [row_cache(double, ids) for ids in rows]


def _last(decoder: Decoder, ids: tuple[int, ...], count: int) -> NDArray[np.float32]:
    """Logits [count, V] of the last positions: a long row's others would take gigabytes."""
    handle = decoder.norm.register_forward_pre_hook(lambda _, arguments: (arguments[0][:, -count:],))
    try:
        logits: NDArray[np.float32] = decoder(torch.tensor([ids]))[0].float().numpy()
    finally:
        handle.remove()
    assert len(logits) == count
    return logits


def row_cache(decoder: Decoder, ids: torch.Tensor) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Key and value [K, S, D] of each layer for one row [1, S]."""
    config, weight = decoder.config, decoder.embedding.weight
    shape = (1, config.n_kv_heads, ids.shape[1], config.head_dim)
    past = [torch.zeros(shape, dtype=weight.dtype) for _ in range(2 * config.n_layers)]
    _, *present = decoder.prefill(ids, torch.zeros((1, 1), dtype=torch.int64), past)
    arrays = [p[0].float().numpy() for p in present]
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def _greedy(decoder: Decoder, prompt: tuple[int, ...], steps: int) -> list[tuple[int, float]]:
    """Greedy tokens of the cached reference, each confirmed by one full pass over the whole row."""
    if not steps:
        return []
    config, weight = decoder.config, decoder.embedding.weight
    shape = (1, config.n_kv_heads, len(prompt) + steps, config.head_dim)
    past = [torch.zeros(shape, dtype=weight.dtype) for _ in range(2 * config.n_layers)]
    logits, *past = decoder.prefill(torch.tensor([prompt]), torch.tensor([[len(prompt) - 1]]), past)
    tokens: list[int] = []
    for _ in range(steps):
        tokens.append(int(logits[0, 0].argmax()))
        if len(tokens) < steps:
            length = torch.tensor([len(prompt) + len(tokens) - 1])
            logits, *past = decoder.decode(torch.tensor([[tokens[-1]]]), length, torch.zeros((1, 1), dtype=torch.int64), past)
    full = decoder(torch.tensor([[*prompt, *tokens[:-1]]]))[0].float().numpy()[len(prompt) - 1 :]
    return [(int(position.argmax()), margin_of(position)) for position in full]
