"""What TensorRT-RTX compiled for this GPU when an engine first ran, kept in the user's cache folder for the next start."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

from tformer_deploy.bundle.verify import cache_folder, read_plain_file
from tformer_deploy.bundle.writer import replace_file
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

_LIMIT = 2**31
_HASH = 32


class RuntimeCacheFile:
    """The file for one plan, one version of TensorRT-RTX and one kind of GPU; its first 32 bytes are the hash of the rest.

    It only saves time: one that is absent, torn or refused is made again, and one that cannot be written is left out.

    Args:
        plan_sha256: The plan's hash.
        version: TensorRT-RTX's.
        gpu: The GPU's name.
    """

    def __init__(self, plan_sha256: str, version: str, gpu: str) -> None:
        kind = re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")
        self.path: Path = cache_folder() / "tensorrt-rtx" / f"{plan_sha256[:32]}-{version}-{kind}.cache"
        self._loaded: bytes | None = None

    def load(self, cache: Any) -> bool:
        """Gives the file's content to the runtime's cache; whether it was taken."""
        try:
            data = read_plain_file(self.path, _LIMIT)
        except (InputError, OSError):
            return False
        if hashlib.sha256(data[_HASH:]).digest() != data[:_HASH]:
            return False
        taken = bool(cache.deserialize(data[_HASH:]))
        self._loaded = data[_HASH:] if taken else None
        return taken

    def save(self, cache: Any) -> bool:
        """Writes what the runtime's cache holds now, where that is new; whether it was written."""
        memory = cache.serialize()
        content = b"" if memory is None else bytes(memory)
        if not content or content == self._loaded:
            return False
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path, hashlib.sha256(content).digest() + content)
        except OSError:
            return False
        self._loaded = content
        return True
