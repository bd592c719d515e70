"""An opened, verified bundle."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tformer_deploy.bundle.manifest import MANIFEST, WEIGHTS, Manifest
from tformer_deploy.bundle.manifest_io import parse_manifest
from tformer_deploy.bundle.verify import Verify, read_plain_file, verify_files, verify_graphs
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.backends.session import Session

NUMPY_DTYPES: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "int8": np.int8}
MANIFEST_LIMIT = 64 * 2**20


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were compared with its manifest.

    Attributes:
        path: Its folder.
        manifest: What it is.
        core_sha256: Hash of ``manifest.json``, and so of everything it names; engines and reports refer to it.
    """

    path: Path
    manifest: Manifest
    core_sha256: str

    @property
    def prefill_path(self) -> Path:
        """The prefill graph."""
        return self.path / "prefill.onnx"

    @property
    def decode_path(self) -> Path:
        """The decode graph."""
        return self.path / "decode.onnx"

    @property
    def weights_path(self) -> Path:
        """The file that both graphs point into."""
        return self.path / WEIGHTS

    def tensor(self, name: str) -> NDArray[Any]:
        """A copy of one tensor as it is stored (bf16 as ml_dtypes.bfloat16, int4 one a byte as int8)."""
        record = self.manifest.tensors[name]
        with self.weights_path.open("rb") as file:
            file.seek(record.offset)
            data = file.read(record.size)
        if record.dtype == "int4":
            return _unpacked(data, math.prod(record.shape)).reshape(record.shape)
        return np.frombuffer(bytearray(data), NUMPY_DTYPES[record.dtype]).reshape(record.shape)

    def asset(self, name: str) -> bytes | None:
        """The bytes of a file that came with the checkpoint, for instance ``tokenizer.json``; None where there is none."""
        return (self.path / name).read_bytes() if name in self.manifest.files else None

    def session(
        self, backend: str = "onnxruntime", threads: int | None = None, profile: ProfileName = "auto", provider: ProviderName = "cpu",
        engine: str | None = None,
    ) -> Session:  # fmt: skip
        """Loads the graphs on a backend: ``onnxruntime``, ``torch`` or ``tensorrt``; see ``backends.open_backend``."""
        from tformer_deploy.backends import open_session

        return open_session(self, backend=backend, threads=threads, profile=profile, provider=provider, engine=engine)


def _unpacked(data: bytes, count: int) -> NDArray[np.int8]:
    """``count`` whole numbers from -8 to 7, two a byte, the first in the low half."""
    pairs = np.frombuffer(data, np.uint8)
    halves = np.stack((pairs & 15, pairs >> 4), axis=1).reshape(-1)[:count]
    return ((halves ^ 8) - 8).astype(np.int8)


def open_bundle(path: str | Path, verify: Verify = "auto") -> Bundle:
    """Opens a bundle and verifies its files.

    Args:
        path: The bundle's folder.
        verify: ``auto`` hashes a large file once on this machine while it stays unchanged; ``full`` always hashes.

    Raises:
        InputError: It is no bundle, or a file is not what the manifest says.
    """
    root = Path(path)
    require_manifest(root)
    data = read_plain_file(root / MANIFEST, MANIFEST_LIMIT)
    manifest = parse_manifest(data)
    verify_files(root, manifest, verify)
    verify_graphs(root, manifest)
    return Bundle(root, manifest, hashlib.sha256(data).hexdigest())


def require_manifest(root: Path) -> None:
    """Refuses a folder that is no bundle at all.

    Raises:
        InputError: It is no folder, or has no manifest.
    """
    if not root.is_dir():
        raise InputError(f"{root} is no bundle: there is no such folder.", "Make one with `tformer-deploy export`.")
    if not os.path.lexists(root / MANIFEST):
        raise InputError(f"{root} is no bundle: it has no {MANIFEST}.", "Make one with `tformer-deploy export`.")
