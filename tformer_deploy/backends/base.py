"""What every backend provides: it executes the two graphs on caches that it allocates. One file a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tformer_deploy.config import DType, ModelConfig


class KVCache(Protocol):
    """Caches of B rows with room for ``capacity`` tokens each, all layers; zeroed when allocated."""

    batch: int
    capacity: int

    def read(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of key and value [B, K, C, D] of one layer, as float32."""

    def write(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Replaces one layer's key and value [B, K, C, D] (tests poison slots with it)."""

    def rows(self, start: int, stop: int) -> Self:
        """The rows ``start … stop - 1`` as a cache that shares this one's memory: a prefill writes straight into slots."""

    def resize(self, rows: Sequence[int], capacity: int) -> Self:
        """A new cache with copies of the given rows and another capacity; new slots are zero, cut ones are lost."""


class Backend(Protocol):
    """Runs prefill and decode as ``bundle/signature.py`` defines them; caches are updated in place.

    Attributes:
        name: ``onnxruntime``, ``torch`` or ``tensorrt``.
        config: The model.
        dtype: What the graphs compute in here.
        max_length: Bound on prompt + completion of a row, from the bundle.
        max_batch: Rows that the backend can run together; None where memory is the only bound.
        notes: Sentences a user should read, for instance that bf16 runs as a graph cast to fp32.
    """

    name: str
    config: ModelConfig
    dtype: DType
    max_length: int
    max_batch: int | None
    notes: tuple[str, ...]

    def capacity_for(self, length: int) -> int:
        """The capacity to allocate for rows of ``length`` tokens (≤ max_length)."""

    def allocate(self, batch: int, capacity: int) -> KVCache:
        """Zeroed caches."""

    def prefill(self, input_ids: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """Right-padded [B, S], [B, N] → logits [B, N, V]; writes slots 0 … S-1 of every row."""

    def decode(
        self, input_ids: NDArray[np.int64], past_lengths: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache
    ) -> NDArray[np.float32]:
        """[B, S], [B], [B, N] → logits [B, N, V]; writes slots past_lengths … past_lengths + S - 1 of each row."""


FIRST_BUCKET = 128


def capacity_bucket(length: int, max_length: int) -> int:
    """The smallest of 128, 256, 512 … that holds ``length`` tokens, at most ``max_length``.

    Attention over a cache costs its capacity, not its length, so rows start in a small one that is grown by copying.
    """
    capacity = FIRST_BUCKET
    while capacity < length:
        capacity *= 2
    return min(capacity, max_length)
