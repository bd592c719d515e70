"""The named ways from a stored tensor to ours, applied block by block so that no second copy of a tensor is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tformer_deploy.parameters import Shape


class Transform(Protocol):
    """Takes rows of the stored tensor, writes them where they belong in ours."""

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape that the stored tensor must have so that ours has ``shape``."""

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Writes ``block``, the stored rows from ``first`` on, into ``target``, our whole tensor."""


@dataclass(frozen=True)
class Same:
    """Stored as we hold it."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Ours."""
        return shape

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Rows stay rows."""
        target[first : first + block.shape[0]] = block


@dataclass(frozen=True)
class Transpose:
    """Stored [out, in], held [in, out]."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Reversed."""
        return shape[::-1]

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Rows become columns."""
        target[:, first : first + block.shape[0]] = block.T


@dataclass(frozen=True)
class SplitQkv:
    """Part ``part`` of ``parts`` equal ones along the last axis (GPT-2 stores query, key and value side by side)."""

    part: int
    parts: int = 3

    def stored_shape(self, shape: Shape) -> Shape:
        """``parts`` times as wide."""
        return (*shape[:-1], shape[-1] * self.parts)

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Takes the part's columns; a vector comes as one block, always."""
        width = target.shape[-1]
        piece = block[..., self.part * width : (self.part + 1) * width]
        target[first : first + piece.shape[0]] = piece


@dataclass(frozen=True)
class Unpermute:
    """Query or key rows of a GGUF Llama: pairs lie side by side (2i, 2i+1) and are held apart (i, i + D/2); and transposed."""

    head_dim: int

    def stored_shape(self, shape: Shape) -> Shape:
        """Reversed for a weight [d, heads * D] (stored [heads * D, d]), the same for a bias."""
        return shape[::-1]

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Each stored row goes to the column of its half."""
        rows = range(first, first + block.shape[0])
        columns = [row - row % self.head_dim + row % self.head_dim // 2 + row % 2 * (self.head_dim // 2) for row in rows]
        target[..., columns] = block.T if block.ndim > 1 else block


SAME, TRANSPOSE = Same(), Transpose()
