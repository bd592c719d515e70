"""Family ``tformer``: our own reference checkpoints, whose config and tensors are in our words already."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import Family, Source, Table
from tformer_deploy.checkpoints.files import replace_file, write_all
from tformer_deploy.checkpoints.safetensors_file import write_safetensors
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError, StorageError, escaped
from tformer_deploy.parameters import parameter_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from tformer_deploy.checkpoints.reader import ConfigReader

_BESIDE = ("model_type", "bos_token_id", "eos_token_id")


def read_config(reader: ConfigReader) -> ModelConfig:
    """``config.json`` is ``ModelConfig.to_dict()`` with ``model_type`` and perhaps token ids."""
    reader.ignore(*reader.data)
    return ModelConfig.from_dict({key: value for key, value in reader.data.items() if key not in _BESIDE})


def table(config: ModelConfig) -> Table:
    """Every tensor under its own name."""
    return {name: Source(name) for name in parameter_shapes(config)}


TFORMER = Family(name="tformer", read_config=read_config, table=table, head="head.weight")


def write_checkpoint(path: Path, config: ModelConfig, state_dict: Mapping[str, Tensor]) -> None:
    """Writes ``config.json`` and ``model.safetensors`` into the folder ``path``, each atomically, the config last.

    Args:
        path: The folder; made where absent.
        config: The model.
        state_dict: Its parameters (fp32, fp16 or bf16), complete.

    Raises:
        InputError: A tensor is missing, unknown, mis-shaped or of another dtype.
        StorageError: Writing failed.
    """
    shapes = parameter_shapes(config)
    wrong = sorted(set(shapes) ^ set(state_dict)) or [n for n in shapes if tuple(state_dict[n].shape) != shapes[n]]
    if wrong:
        raise InputError(f"These tensors are missing, unknown or mis-shaped for the config: {', '.join(map(escaped, wrong))}.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"The folder {escaped(str(path))} cannot be made: {error.strerror}.") from None
    write_safetensors(path / "model.safetensors", {name: state_dict[name] for name in shapes})
    text = json.dumps({"model_type": TFORMER.name} | config.to_dict(), indent=2) + "\n"
    replace_file(path / "config.json", lambda descriptor: write_all(descriptor, text.encode()))
