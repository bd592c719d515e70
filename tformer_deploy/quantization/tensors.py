"""Every tensor of a quantised bundle, in the order of its file: what the exporter writes and the check recomputes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_deploy.bundle.quantization import EMBEDDING, HEAD, block_for, is_matrix, scale_name, untied
from tformer_deploy.parameters import parameter_shapes
from tformer_deploy.quantization.gptq import quantize_with
from tformer_deploy.quantization.rounding import Quantized, quantize
from tformer_deploy.reference.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tformer_deploy.bundle.quantization import Quantization
    from tformer_deploy.config import ModelConfig
    from tformer_deploy.quantization.calibration import Rows
    from tformer_deploy.reference.layers import Block, Step

# Matrices of a block that read the same input, by the first one's name.
_READERS: dict[str, tuple[str, ...]] = {
    "attention.query": ("attention.query", "attention.key", "attention.value"),
    "attention.out": ("attention.out",),
    "feed_forward.up": ("feed_forward.gate", "feed_forward.up"),
    "feed_forward.down": ("feed_forward.down",),
}


# Tokens of the calibration that go through a block together.
_TOGETHER = 2048


class WeightSource(Protocol):
    """A model's weights in our names and layout, one at a time (``checkpoints.Checkpoint``)."""

    @property
    def config(self) -> ModelConfig:
        """The model."""

    @property
    def tensors(self) -> Mapping[str, object]:
        """Names of all parameters, in the order of ``Decoder.named_parameters()``."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor in ``dtype``."""


class StoredTensor(NamedTuple):
    """A tensor of the file.

    Attributes:
        name: Its name there.
        dtype: As it is stored: fp32, fp16, int8 or int4.
        tensor: Its values; int4 is int8 here, one a byte.
    """

    name: str
    dtype: str
    tensor: Tensor


def quantized_tensors(
    source: WeightSource, quantization: Quantization, rows: Rows | None = None, on_part: Callable[[str], None] = lambda _: None
) -> Iterator[StoredTensor]:
    """The stored tensors, one block of the model in memory at a time.

    Args:
        source: The unquantised model.
        quantization: How its matrices are stored.
        rows: What they are rounded for; None: each to the nearest, under the scales that fit it best.
        on_part: Called with a few words at the start of each part.

    Raises:
        InputError: The source cannot be read, or holds values that are not finite.
    """
    rounded: dict[str, Quantized] = {}
    calibrated = None if rows is None else _Calibrated(source, quantization, rows)
    for name in parameter_shapes(untied(source.config)):
        if not is_matrix(name):
            tensor = read_plain(source, name)
            if name == EMBEDDING and calibrated is not None:
                calibrated.enter(tensor)
            yield StoredTensor(name, "fp16" if name == EMBEDDING else "fp32", tensor)
            continue
        if calibrated is None:
            weight = read_matrix(source, name)
            found = quantize(weight, quantization.kind_of(name), block_for(len(weight), quantization.block))
        else:
            if name not in rounded:
                on_part(f"rounding {name.rsplit('.', 3)[0] if name != HEAD else 'the head'}")
                rounded = calibrated.next_part(name)
            found = rounded.pop(name)
        yield StoredTensor(name, quantization.kind_of(name), found.values)
        yield StoredTensor(scale_name(name), "fp32", found.scales)


def read_plain(source: WeightSource, name: str) -> Tensor:
    """A tensor that is not quantised, as it is stored."""
    return source.read(name, torch.float16 if name == EMBEDDING else torch.float32)


def read_matrix(source: WeightSource, name: str) -> Tensor:
    """[K, N] float32; a tied head is a view of the embedding, turned."""
    if name == HEAD and HEAD not in source.tensors:
        return source.read(EMBEDDING, torch.float32).T
    return source.read(name, torch.float32)


class _Calibrated:
    """Runs the rows through the model block by block; each block's matrices are rounded for what reaches them, and the next
    block reads what the rounded ones make.

    Everything is float64, so that another machine's order of sums hardly ever moves a value to another level.
    """

    def __init__(self, source: WeightSource, quantization: Quantization, rows: Rows) -> None:
        self.source, self.quantization = source, quantization
        self.rows = _stacked(rows)
        with torch.device("meta"):
            self.decoder = Decoder(untied(source.config)).eval().double()
        self.states: list[Tensor] = []
        self.steps: list[Step] = []

    def enter(self, embedding: Tensor) -> None:
        """Makes the first block's inputs from the embedding as it is stored."""
        decoder = self.decoder
        for name, module in decoder.named_children():
            if name in ("positions", "embedding_norm", "rope", "window_rope", "alibi"):
                self._fill(module, name)
        decoder.embedding = _Table(embedding)  # type: ignore[assignment]
        with torch.inference_mode():
            for ids in self.rows:
                x, step = decoder.enter(ids, None, None, training=True)
                self.states.append(x)
                self.steps.append(step)
        for name, module in decoder.named_children():
            if name != "blocks":
                module.to("meta")
        decoder.embedding.table = torch.empty(0)

    def next_part(self, first: str) -> dict[str, Quantized]:
        """The rounded matrices of the block, or of the head, whose first one is ``first``."""
        if first == HEAD:
            return self._head()
        prefix = ".".join(first.split(".")[:2])
        block: Block = self.decoder.get_submodule(prefix)  # type: ignore[assignment]
        self._fill(block, prefix)
        moments = self._moments(block)
        rounded: dict[str, Quantized] = {}
        for reader, names in _READERS.items():
            for name in names:
                if f"{prefix}.{name}.weight" in self.source.tensors:
                    rounded[f"{prefix}.{name}.weight"] = self._round(
                        block.get_submodule(name), f"{prefix}.{name}.weight", moments[reader]
                    )
        with torch.inference_mode():
            self.states = [block(x, step, None)[0] for x, step in zip(self.states, self.steps, strict=True)]
        block.to("meta")
        return rounded

    def _head(self) -> dict[str, Quantized]:
        self._fill(self.decoder.norm, "norm")
        moments = _Moments()
        with torch.inference_mode():
            for x in self.states:
                moments.add(self.decoder.norm(x))
        weight = read_matrix(self.source, HEAD)
        return {HEAD: self._quantize(weight, HEAD, moments)}

    def _round(self, linear: nn.Module, name: str, moments: _Moments) -> Quantized:
        """Rounds a matrix, and leaves it in its place as the graph will see it."""
        found = self._quantize(read_matrix(self.source, name), name, moments)
        weight = linear.get_parameter("weight")
        with torch.no_grad():
            weight.copy_(found.dequantized()[: len(weight)])
        return found

    def _quantize(self, weight: Tensor, name: str, moments: _Moments) -> Quantized:
        block = block_for(len(weight), self.quantization.block)
        return quantize_with(weight, self.quantization.kind_of(name), block, moments.mean())

    def _moments(self, block: Block) -> dict[str, _Moments]:
        """Of what reaches each group of matrices, under the block's own weights."""
        found = {name: _Moments() for name in _READERS}
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(lambda _, args, moments=moments: moments.add(args[0]))
            for name, moments in found.items()
        ]
        with torch.inference_mode():
            for x, step in zip(self.states, self.steps, strict=True):
                block(x, step, None)
        for hook in hooks:
            hook.remove()
        return found

    def _fill(self, module: nn.Module, prefix: str) -> None:
        module.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(self.source.read(f"{prefix}.{name}", torch.float32))


def _stacked(rows: Rows) -> list[Tensor]:
    """Neighbouring rows of one length together, [B, S] each."""
    stacks: list[list[tuple[int, ...]]] = []
    for row in rows:
        if stacks and len(stacks[-1][0]) == len(row) and (len(stacks[-1]) + 1) * len(row) <= _TOGETHER:
            stacks[-1].append(row)
        else:
            stacks.append([row])
    return [torch.tensor(stack) for stack in stacks]


class _Table(nn.Module):
    """Looks rows up as they are stored; the table itself is never made float64."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """[…] int64 → […, d] float64."""
        return F.embedding(ids, self.table).double()


class _Moments:
    """Sum of x xᵀ over all vectors x that came."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, x: Tensor) -> None:
        """Takes vectors [..., K]."""
        flat = x.reshape(-1, x.shape[-1])
        product = flat.T @ flat
        self.total = product if self.total is None else self.total.add_(product)
        self.count += len(flat)

    def mean(self) -> Tensor:
        """[K, K] float64."""
        assert self.total is not None
        return self.total / self.count
