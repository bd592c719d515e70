"""What PyTorch says, computed once and kept as arrays, so that the model can be freed before a runtime is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tformer_deploy.parity.metrics import margin_of

if TYPE_CHECKING:
    import numpy as np
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
    """

    logits: list[NDArray[np.float32]]
    caches: list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]
    greedy: list[list[tuple[int, float]]]


@torch.inference_mode()
def ask(decoder: Decoder, plan: Plan) -> Oracle:
    """Runs the reference over a plan, row by row."""
    logits, caches = [], []
    for row in plan.rows:
        ids = torch.tensor([row])
        logits.append(decoder(ids)[0].float().numpy())
        caches.append(_row_cache(decoder, ids))
    greedy = [_greedy(decoder, row[:n], plan.greedy) for row, n in zip(plan.rows[:2], plan.lengths[:2], strict=True)]
    return Oracle(logits, caches, greedy)


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
    return [double(ids)[0].float().numpy() for ids in rows], [_row_cache(double, ids) for ids in rows]


def _row_cache(decoder: Decoder, ids: torch.Tensor) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
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
