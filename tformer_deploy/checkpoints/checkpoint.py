"""An opened checkpoint: the config in our words, and every tensor of the model in our names and layout, read one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from tformer_deploy.checkpoints.files import hash_files
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.parameters import Shape, parameter_shapes

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from tformer_deploy.checkpoints.family import Located
    from tformer_deploy.checkpoints.tokens import Tokens
    from tformer_deploy.config import ModelConfig

Format = Literal["safetensors", "gguf"]
_TORCH = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class TensorSpec(NamedTuple):
    """A tensor in our layout; ``dtype`` (``fp32``, ``fp16``, ``bf16``) is the checkpoint's own."""

    shape: Shape
    dtype: str


class Checkpoint:
    """What ``open_checkpoint`` returns.

    Attributes:
        path: What was opened.
        format: ``safetensors`` or ``gguf``.
        family: The ``model_type``.
        config: The model in our words.
        tensors: Every parameter of ``Decoder(config)``, in its order.
    """

    def __init__(
        self, path: Path, kind: Format, family: str, config: ModelConfig, located: dict[str, tuple[Located, ...]], tokens: Tokens,
        files: tuple[Path, ...],
    ) -> None:  # fmt: skip
        self.path, self.family, self.config = path, family, config
        self.format: Format = kind
        self._located, self._tokens, self._files = located, tokens, files
        self._zero: list[str] = []
        self._sha256: str | None = None
        shapes = parameter_shapes(config)
        self.tensors = {name: TensorSpec(shapes[name], parts[0].entry.dtype) for name, parts in located.items()}

    @property
    def name(self) -> str:
        """The folder's or file's name without its ending."""
        path = self.path.resolve()
        return path.stem if path.suffix == ".gguf" else path.name

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: the union of every place that names one, sorted."""
        return self._tokens.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, where the checkpoint names one."""
        return self._tokens.bos_token_id

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd but not refused; grows by tensors found to be all zero as they are read."""
        return (*self._tokens.warnings, *(f"Tensor {name} is all zero." for name in self._zero))

    def assets(self) -> dict[str, bytes]:
        """Those of tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja that there are."""
        return dict(self._tokens.assets)

    def asset(self, name: str) -> bytes | None:
        """The bytes of one of them; None where there is none."""
        return self._tokens.assets.get(name)

    def sha256(self) -> str:
        """SHA-256 over all files that were used: of the lines ``<sha256>  <name>`` that sha256sum prints, sorted by name."""
        if self._sha256 is None:
            self._sha256 = hash_files(self._files)
        return self._sha256

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor in our layout, contiguous, in ``dtype`` or its own (GGUF: dequantised to fp32).

        It is read, checked and turned a few MiB at a time, so that nothing as large as the result is held beside it.

        Raises:
            InputError: It holds NaN or infinite values (counted), or values that fp16 cannot hold.
            StorageError: Reading failed.
        """
        import torch  # here and not above: opening needs none of it, and a bad checkpoint is refused at once

        spec = self.tensors[name]
        target = torch.empty(spec.shape, dtype=dtype or getattr(torch, _TORCH[spec.dtype]))
        zero = [_read_into(target, part, name) for part in self._located[name]]
        if all(zero) and len(spec.shape) > 1 and name not in self._zero:
            self._zero.append(name)
        return target


def _read_into(target: Tensor, found: Located, name: str) -> bool:
    """Reads one stored tensor to where it belongs; whether it is all zero."""
    import torch

    nan = infinite = 0
    zero = True
    rows, step = found.entry.shape[0], found.block_rows()
    for first in range(0, rows, step):
        block = found.file.rows(found.stored, first, min(step, rows - first))
        low, high = (float(x) for x in torch.aminmax(block))
        if not (low > -torch.inf and high < torch.inf):  # also where they are NaN
            nan += int(block.isnan().sum())
            infinite += int(block.isinf().sum())
            continue
        zero = zero and low == high == 0
        if target.dtype == torch.float16:
            _refuse_overflow(name, low, high)
        found.transform.place(target, block, first)
    if nan or infinite:
        place = f"{escaped(found.stored)} in {escaped(found.file.path.name)}"
        raise InputError(f"Tensor {name} ({place}) has {nan} NaN and {infinite} infinite values.", "Use an undamaged checkpoint.")
    return zero


def _refuse_overflow(name: str, low: float, high: float) -> None:
    largest = high if high >= -low else low
    if abs(largest) >= 65520:  # from here on fp16 rounds to infinity
        raise InputError(
            f"Tensor {name} has the value {largest:.6g}; fp16 ends at ±65504.", "Export with --dtype bf16 or --dtype fp32."
        )
