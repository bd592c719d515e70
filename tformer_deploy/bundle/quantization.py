"""What a quantised bundle is made of: kinds, blocks, and the tensors that stand for the model's matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from tformer_deploy.parameters import Shape, constant_shapes, parameter_shapes

if TYPE_CHECKING:
    from tformer_deploy.config import DType, ModelConfig

# dtypes of whole numbers in weights.bin, and how a bundle multiplies with them: int8-dynamic stores int8 with one scale for
# each output, and its graphs round rows to int8 themselves.
Whole = Literal["int8", "int4"]
Kind = Literal["int8", "int4", "int8-dynamic"]
WHOLE: tuple[Whole, ...] = get_args(Whole)
KINDS: tuple[Kind, ...] = get_args(Kind)
DYNAMIC: Kind = "int8-dynamic"
BLOCKS = (32, 64, 128)
CALIBRATION = "calibration.json"
EMBEDDING, HEAD = "embedding.weight", "head.weight"
_PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")


@dataclass(frozen=True)
class Calibration:
    """The rows of ids that the weights were rounded for; they lie in ``calibration.json``.

    Attributes:
        name: The text's file name, never its path.
        rows: How many rows.
        tokens: Ids in all.
    """

    name: str
    rows: int
    tokens: int


@dataclass(frozen=True)
class Quantization:
    """How the matrices of a bundle are stored.

    Attributes:
        kind: Of the blocks' projections.
        head: Of the head.
        block: Inputs that share a scale, at most; :func:`block_for` says how many really do. None in int8-dynamic, and in int8
            graphs that are derived from it for an engine: all of them.
        calibration: What the weights were rounded for; None: each to the nearest.
    """

    kind: Kind
    head: Kind
    block: int | None
    calibration: Calibration | None = None

    @property
    def dynamic(self) -> bool:
        """Whether the graphs round rows themselves, one scale a row."""
        return self.kind == DYNAMIC

    @property
    def stored(self) -> Whole:
        """How the blocks' matrices are stored."""
        return "int8" if self.kind == DYNAMIC else self.kind  # type: ignore[return-value]

    @property
    def sentence(self) -> str:
        """For a reader."""
        head = "" if self.head == self.kind else f", the head in {self.head}"
        known = "each value rounded to the nearest; nothing was known of activations"
        if self.calibration is not None:
            known = f"rounded for {self.calibration.tokens} tokens of {self.calibration.name}"
        scales = "one scale an output" if self.block is None else f"blocks of {self.block}"
        scales += ", and one a row of activations" if self.dynamic else ""
        return f"Matrices in {self.kind}, {scales}{head}: {known}."

    def kind_of(self, name: str) -> Whole:
        """The stored dtype of one matrix."""
        kind = self.head if name == HEAD else self.kind
        return "int8" if kind == DYNAMIC else kind  # type: ignore[return-value]


def default_block(calibrated: bool) -> int:
    """Inputs that share a scale where nobody says how many; docs/quantization.md has the measurements."""
    return 128 if calibrated else 32


def block_for(width: int, largest: int | None) -> int:
    """Inputs of a matrix that share a scale: of 32, 64 and 128 up to ``largest`` the one that pads ``width`` least, then the
    largest one; all of them where ``largest`` is None. A block that does not divide a width is read differently by every
    runtime, so there are only whole ones.
    """
    if largest is None:
        return width
    return min((b for b in BLOCKS if b <= largest), key=lambda b: (padded(width, b), -b))


def padded(width: int, block: int) -> int:
    """``width`` in whole blocks."""
    return -(-width // block) * block


def untied(config: ModelConfig) -> ModelConfig:
    """The config that a quantised graph has: a tied head is stored by itself, for it is rounded and the embedding is not."""
    return replace(config, tied=False)


def is_matrix(name: str) -> bool:
    """Whether a parameter is multiplied with, and so quantised: projections and the head."""
    parts = name.split(".")
    return name == HEAD or (len(parts) > 2 and parts[-1] == "weight" and parts[-2] in _PROJECTIONS)


def scale_name(name: str) -> str:
    """The scales of a matrix."""
    return f"{name.removesuffix('.weight')}.scale"


def stored_tensors(config: ModelConfig, dtype: DType, quantization: Quantization | None) -> dict[str, tuple[Shape, str]]:
    """Name → shape and dtype of every tensor of ``weights.bin``, in the order of the file.

    A quantised matrix [K, N] is [Kp, N] of ``int8`` or ``int4`` (two a byte, the first in the low half), K padded to whole
    blocks, followed by its scales [Kp / block, N]; the embedding, which is only looked up, is fp16.
    """
    constants = {name: (shape, "fp32") for name, shape in constant_shapes(config).items()}
    if quantization is None:
        return {name: (shape, str(dtype)) for name, shape in parameter_shapes(config).items()} | constants
    stored: dict[str, tuple[Shape, str]] = {}
    for name, shape in parameter_shapes(untied(config)).items():
        if is_matrix(name):
            block = block_for(shape[0], quantization.block)
            rows = padded(shape[0], block)
            stored[name] = ((rows, shape[1]), quantization.kind_of(name))
            stored[scale_name(name)] = ((rows // block, shape[1]), str(dtype))
        else:
            stored[name] = (shape, "fp16" if name == EMBEDDING else str(dtype))
    return stored | constants


def stored_size(shape: Shape, dtype: str) -> int:
    """Bytes of a tensor."""
    count = 1
    for dim in shape:
        count *= dim
    return -(-count // 2) if dtype == "int4" else count * {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}[dtype]
