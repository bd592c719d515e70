"""Opens a checkpoint of any supported family and format."""

from __future__ import annotations

import os
from pathlib import Path

from tformer_deploy.checkpoints.checkpoint import Checkpoint
from tformer_deploy.checkpoints.families import FAMILIES
from tformer_deploy.checkpoints.files import opened
from tformer_deploy.checkpoints.folder import open_folder
from tformer_deploy.errors import InputError, escaped


def open_checkpoint(path: str | Path, max_length: int | None = None) -> Checkpoint:
    """Opens a checkpoint and accounts for its config and every tensor; no weights are read yet.

    Args:
        path: A folder with ``config.json`` and safetensors, or a GGUF file.
        max_length: Tokens a row may hold, for a checkpoint whose config does not say; otherwise its own count stands.

    Raises:
        InputError: It is damaged, incomplete or not supported; the message names the file and key or tensors.
        StorageError: Reading failed.
    """
    path = Path(path)
    if os.path.isdir(path):  # false, and no error, for what cannot be a path
        return open_folder(path, FAMILIES, max_length)
    try:
        os.lstat(path)
    except FileNotFoundError:
        raise InputError(
            f"{escaped(str(path))} does not exist.",
            "Name a folder or a GGUF file on this machine; nothing is fetched from a hub.",
        ) from None
    except (OSError, ValueError):
        pass  # said below
    with opened(path) as (file, _):
        start = file.read(4)
    if start == b"GGUF" or path.suffix == ".gguf":
        from tformer_deploy.checkpoints.gguf import open_gguf  # needs torch, which a bad folder should not wait for

        return open_gguf(path, max_length)
    raise InputError(f"{escaped(str(path))} is neither a folder nor a GGUF file.", "Name the folder that holds config.json.")
