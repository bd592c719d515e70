"""Opens a GGUF file: config from its metadata, tensors by its architecture's table, tokenizer converted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.checkpoint import Checkpoint
from tformer_deploy.checkpoints.family import Family, locate
from tformer_deploy.checkpoints.gguf.architectures import ARCHITECTURES
from tformer_deploy.checkpoints.gguf.file import GgufFile
from tformer_deploy.checkpoints.gguf.keys import GgufReader
from tformer_deploy.checkpoints.gguf.tokenizer import read_gguf_tokens
from tformer_deploy.checkpoints.model_config import read_model
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from pathlib import Path


def open_gguf(path: Path, max_length: int | None) -> Checkpoint:
    """The checkpoint in the GGUF file ``path``.

    Raises:
        InputError: It is damaged, or of an architecture, scaling or tokenizer that is not supported.
        StorageError: Reading failed.
    """
    file = GgufFile(path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(
            f"{escaped(path.name)}: general.architecture is {name!r:.80}; supported are {', '.join(ARCHITECTURES)}.",
            "Use a model of one of these architectures.",
        )
    if file.metadata.get("split.count", 1) != 1:
        raise InputError(
            f"{escaped(path.name)} is one of several parts (split.count).", "Merge them with `llama-gguf-split --merge`."
        )
    architecture, reader = ARCHITECTURES[name], GgufReader(file, name, max_length)
    config = read_model(architecture.read_config, reader)
    family = Family(
        name=architecture.family,
        read_config=lambda _: config,
        table=lambda model: architecture.table(model, reader),
        dropped=tuple(re.compile(re.escape(tensor)) for tensor in reader.taken),
        head="output.weight",
    )
    located = locate(family, config, [file], escaped(str(path)))
    tokens = read_gguf_tokens(file, config.vocab_size)
    tokens.warnings = (*reader.warnings, *tokens.warnings)
    return Checkpoint(path, "gguf", family.name, config, located, tokens, (path,))
