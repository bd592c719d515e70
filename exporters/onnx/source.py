"""What the exporter needs of the thing it exports: a checkpoint provides it, and so does a bundle in another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from tformer_deploy.config import ModelConfig


class ExportSource(Protocol):
    """A model's weights in our names and layout, one at a time, and where they came from (``checkpoints.Checkpoint``)."""

    @property
    def path(self) -> Path:
        """The folder or file that must not be touched."""

    @property
    def name(self) -> str:
        """What to call it in the manifest; never a path."""

    @property
    def format(self) -> str:
        """``safetensors`` or ``gguf``."""

    @property
    def family(self) -> str:
        """Its model_type."""

    @property
    def config(self) -> ModelConfig:
        """The model."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a row."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text."""

    @property
    def tensors(self) -> Mapping[str, object]:
        """Names of all parameters, in the order of ``Decoder.named_parameters()``."""

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, contiguous, in ``dtype`` or the source's own; the caller keeps no more than one."""

    def sha256(self) -> str:
        """Hash over the source's files."""

    def assets(self) -> dict[str, bytes]:
        """Tokenizer files and the like, by file name."""
