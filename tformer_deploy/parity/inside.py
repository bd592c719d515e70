"""Values inside the reference, at the seams of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tformer_deploy.bundle.signature import ATTENTION_OUTPUT, BLOCK_OUTPUT, BLOCKS_INPUT, LOGITS, cache_names
from tformer_deploy.parity.oracle import row_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tformer_deploy.config import DType
    from tformer_deploy.reference import Decoder

    Values = dict[str, list[NDArray[np.float64]]]

# What the reference is rounded to for its own noise, and what it is compared with then.
_ROUNDED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Inside:
    """By name in a graph, and row: [S, width] float64; caches under their ``present`` names.

    Attributes:
        values: One precision finer than the bundle's: float64 for fp32, float32 for fp16 and bf16.
        noise: The same in the bundle's own precision: how far a right computation may be off.
    """

    values: Values
    noise: Values


@torch.inference_mode()
def look_inside(decoder: Decoder, rows: Sequence[tuple[int, ...]], dtype: DType) -> Inside:
    """Runs each row alone, without a cache, in two precisions.

    Args:
        decoder: The reference in float32; it is converted.
        rows: Ids.
        dtype: The bundle's.
    """
    if dtype == "fp32":
        noise = _record(decoder, rows)
        return Inside(_record(decoder.double(), rows), noise)
    values = _record(decoder, rows)
    return Inside(values, _record(decoder.to(_ROUNDED[dtype]), rows))


def _record(decoder: Decoder, rows: Sequence[tuple[int, ...]]) -> Values:
    found: Values = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        found.setdefault(name, []).append(tensor[0].double().numpy())

    for row in rows:
        ids = torch.tensor([row])
        handles = [decoder.blocks[0].register_forward_pre_hook(lambda _, args: keep(BLOCKS_INPUT, args[0]))]
        for i, block in enumerate(decoder.blocks):
            attention = block.get_submodule("attention")
            handles.append(attention.register_forward_hook(_keeper(keep, ATTENTION_OUTPUT.format(layer=i))))
            handles.append(block.register_forward_hook(_keeper(keep, BLOCK_OUTPUT.format(layer=i))))
        keep(LOGITS, decoder(ids))
        for handle in handles:
            handle.remove()
        caches = [array for layer in row_cache(decoder, ids) for array in layer]
        for name, array in zip(cache_names(decoder.config.n_layers, "present"), caches, strict=True):
            slots = torch.from_numpy(array).transpose(0, 1)
            keep(name, slots.reshape(1, slots.shape[0], -1))
    return found


def _keeper(keep: Callable[[str, torch.Tensor], None], name: str) -> Callable[..., None]:
    """Keeps what a module returns, or the first of what it returns."""

    def hook(_module: object, _args: object, output: Any) -> None:
        keep(name, output[0] if isinstance(output, tuple) else output)

    return hook
