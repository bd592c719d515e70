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
class Rows:
    """Some output rows of a fused projection, transposed.

    The stored rows are cut into groups of ``group``; of each, rows ``start`` … ``start + count - 1`` are ours. One group: all
    queries, then all keys, then all values. A group a head: query, key and value of one head, then of the next.
    """

    group: int
    start: int
    count: int

    def stored_shape(self, shape: Shape) -> Shape:
        """[out, in] (or [out]) with as many groups as ours has parts of ``count``."""
        return (shape[-1] // self.count * self.group, *shape[:-1])

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """The block's rows that are ours become columns."""
        rows = range(first, first + block.shape[0])
        kept = [i for i, row in enumerate(rows) if self.start <= row % self.group < self.start + self.count]
        columns = [rows[i] // self.group * self.count + rows[i] % self.group - self.start for i in kept]
        target[..., columns] = (block[kept].T if block.ndim > 1 else block[kept]).to(target.dtype)


@dataclass(frozen=True)
class Unpermute:
    """Query or key rows whose rotated pairs lie side by side (2i, 2i+1), held apart (i, i + dim/2); and transposed.

    ``dim``: the first dims of a head that are rotated; the others stay. All where None.
    """

    head_dim: int
    dim: int | None = None

    def stored_shape(self, shape: Shape) -> Shape:
        """Reversed for a weight [d, heads * D] (stored [heads * D, d]), the same for a bias."""
        return shape[::-1]

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Each stored row goes to the column of its half."""
        columns = [self.column(row) for row in range(first, first + block.shape[0])]
        target[..., columns] = (block.T if block.ndim > 1 else block).to(target.dtype)

    def column(self, row: int) -> int:
        """Where a stored row goes."""
        dim = self.head_dim if self.dim is None else self.dim
        head, i = divmod(row, self.head_dim)
        return head * self.head_dim + (i if i >= dim else i // 2 + i % 2 * (dim // 2))


@dataclass(frozen=True)
class UnpermuteHeads:
    """A weight for each head [heads, D] whose dims are turned as :class:`Unpermute` turns query rows."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Ours."""
        return shape

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """The last axis is turned."""
        turn = Unpermute(block.shape[-1])
        columns = [turn.column(i) for i in range(block.shape[-1])]
        target[first : first + block.shape[0], columns] = block.to(target.dtype)


@dataclass(frozen=True)
class PlusOne:
    """A norm weight stored as its distance from one."""

    def stored_shape(self, shape: Shape) -> Shape:
        """Ours."""
        return shape

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """The sum is made in float32 and rounded once."""
        target[first : first + block.shape[0]] = block.float() + 1


@dataclass(frozen=True)
class SkipRows:
    """Our table without the first ``count`` stored rows."""

    count: int

    def stored_shape(self, shape: Shape) -> Shape:
        """``count`` rows more."""
        return (shape[0] + self.count, *shape[1:])

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """Rows move up."""
        kept = block[max(0, self.count - first) :]
        start = max(0, first - self.count)
        target[start : start + kept.shape[0]] = kept


@dataclass(frozen=True)
class IntoRow:
    """A vector that is row ``row`` of ours, which ``rows`` stored vectors fill."""

    row: int

    def stored_shape(self, shape: Shape) -> Shape:
        """One row."""
        return shape[1:]

    def place(self, target: Tensor, block: Tensor, first: int) -> None:
        """A vector comes as one block, always."""
        target[self.row] = block


SAME, TRANSPOSE = Same(), Transpose()
