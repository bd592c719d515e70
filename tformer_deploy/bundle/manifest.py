"""``manifest.json``: what a bundle is, as strict dataclasses. The last file written, the first one read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.config import DType, ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.bundle.quantization import Quantization

# The newest that is read. A bundle is written in the oldest that can say what it is: 2 is 1 with ``quantization``.
SCHEMA = 2
MANIFEST, WEIGHTS = "manifest.json", "weights.bin"


@dataclass(frozen=True)
class FileRecord:
    """sha256 (hex) and size in bytes of one core file."""

    sha256: str
    size: int


@dataclass(frozen=True)
class TensorRecord:
    """Where one tensor lies in ``weights.bin``; row-major, little-endian, offset a multiple of 4096.

    ``dtype`` is fp32, fp16, bf16, int8 or int4 (two a byte, the first in the low half).
    """

    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Source:
    """Where the weights came from: the name (never the path) and a sha256 over the checkpoint's files."""

    name: str
    format: str
    family: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The frozen core of a bundle.

    Attributes:
        schema: Layout version of this file.
        config: The model.
        dtype: What weights and caches are in; quantised matrices apart.
        max_length: Bound on prompt + completion of a row.
        eos_token_ids: Ids that end a row (union of generation_config, config and tokenizer).
        bos_token_id: For display and chat templates; None where there is none.
        source: Where the weights came from.
        versions: Versions of what wrote the bundle, by package name.
        files: Every core file but the manifest itself, by relative name.
        tensors: Every tensor of ``weights.bin`` by name (reference/decoder.py names them).
        quantization: How matrices are stored; None: in ``dtype``.
    """

    config: ModelConfig
    dtype: DType
    max_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    source: Source
    versions: dict[str, str]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    schema: int = 1
    quantization: Quantization | None = None
