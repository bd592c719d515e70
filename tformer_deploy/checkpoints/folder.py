"""Opens a folder in the Hugging Face layout: ``config.json`` and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tformer_deploy.checkpoints.checkpoint import Checkpoint
from tformer_deploy.checkpoints.family import Family, locate
from tformer_deploy.checkpoints.files import listing, read_small
from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.checkpoints.safetensors_file import SafetensorsFile
from tformer_deploy.checkpoints.tokens import CONFIG, read_tokens
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PLAIN = re.compile(r"[^./\\\x00][^/\\\x00]*\.safetensors")
_CONFIG_LIMIT, _INDEX_LIMIT = 1 << 23, 1 << 26


def open_folder(path: Path, families: Mapping[str, Family], max_length: int | None) -> Checkpoint:
    """The checkpoint in the folder ``path``.

    Raises:
        InputError: It is damaged, incomplete or of no family here.
        StorageError: Reading failed.
    """
    data = parse_object(_read_config(path), CONFIG)
    reader = ConfigReader(data, CONFIG, max_length)
    reader.refuse_features()
    family = _family(data, families)
    config = family.read_config(reader)
    reader.finish()
    paths, warnings = _weight_files(path)
    located = locate(family, config, _open_all(path, paths), escaped(str(path)))
    tokens = read_tokens(path, data, config.vocab_size)
    tokens.warnings = (*reader.warnings, *warnings, *tokens.warnings)
    beside = [path / name for name in (CONFIG, INDEX, *tokens.assets) if (path / name).is_file()]
    return Checkpoint(path, "safetensors", family.name, config, located, tokens, (*beside, *paths))


def _read_config(path: Path) -> bytes:
    if not (path / CONFIG).exists() and (found := [name for name in listing(path) if name.endswith(".gguf")]):
        raise InputError(f"{escaped(str(path))} has no {CONFIG}.", f"Name the GGUF file itself: {escaped(str(path / found[0]))}.")
    return read_small(path / CONFIG, _CONFIG_LIMIT)


def _family(data: dict[str, Any], families: Mapping[str, Family]) -> Family:
    kind = data.get("model_type")
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(
            f"{CONFIG}: model_type is {escaped(repr(kind))}; supported are {', '.join(families)}.",
            "Use a model of one of these families.",
        )
    names = data.get("architectures")
    if names is not None and family.architectures:
        wrong = names if not isinstance(names, list) else [n for n in names if n not in family.architectures]
        if wrong:
            raise InputError(
                f"{CONFIG}: architectures is {escaped(repr(names))}; {family.name} may have {', '.join(family.architectures)}.",
                "Use the causal language model of this checkpoint.",
            )
    return family


def _weight_files(path: Path) -> tuple[list[Path], list[str]]:
    """The safetensors files that hold the weights, and warnings about those that do not count."""
    listed = listing(path)
    there = [name for name in listed if name.endswith(".safetensors")]
    if (path / INDEX).exists():
        names = _index_files(path)
    elif SINGLE in there or (path / SINGLE).is_symlink():
        names = [SINGLE]
    elif there:
        raise InputError(
            f"{escaped(str(path))} has {', '.join(map(escaped, there))}, but neither {SINGLE} nor {INDEX}.",
            "Add the index that came with the shards.",
        )
    else:
        _refuse_pickle(path, listed)
        raise InputError(f"{escaped(str(path))} has no weights: neither {SINGLE} nor {INDEX}.", "Complete the checkpoint.")
    warnings = [f"{escaped(name)} is not among the checkpoint's weights and is ignored." for name in there if name not in names]
    if any(name.endswith(".bin") for name in listed):
        warnings.append("The .bin files beside the safetensors are never opened.")
    return [path / name for name in names], warnings


def _refuse_pickle(path: Path, listed: list[str]) -> None:
    pickles = [name for name in listed if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".bin.index.json"))]
    if pickles:
        raise InputError(
            f"{escaped(str(path))} has its weights in {', '.join(map(escaped, pickles[:3]))} only: pickle, which can run code.",
            "Convert it to safetensors, if you trust it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…).",
        )


def _index_files(path: Path) -> list[str]:
    """The shards that the index names, all present.

    Raises:
        InputError: The index is damaged, names a path outside the folder, or a file that is absent.
    """
    named = list(_weight_map(path).values())
    for name in named:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise InputError(f"{INDEX} names {escaped(repr(name))[:80]}; expected the plain name of a .safetensors file.")
    names = set(named)
    absent = sorted(name for name in names if not (path / name).exists())
    if absent:
        raise InputError(f"{INDEX} names files that are absent: {', '.join(map(escaped, absent))}.", "Complete the download.")
    return sorted(names)


def _weight_map(path: Path) -> dict[str, Any]:
    weight_map = parse_object(read_small(path / INDEX, _INDEX_LIMIT), INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{INDEX} has no weight_map of tensor names to files.", "Get the index again.")
    return weight_map


def _open_all(path: Path, paths: list[Path]) -> list[SafetensorsFile]:
    """The files; with an index, each holds just the tensors that the index says."""
    files = [SafetensorsFile(file) for file in paths]
    if not (path / INDEX).exists():
        return files
    weight_map = _weight_map(path)
    held = {(name, file.path.name) for file in files for name in file.entries}
    named = set(weight_map.items())
    if held != named:
        parts = [
            f"{escaped(n)} in {escaped(f)} ({'only the index says so' if (n, f) in named else 'not in the index'})"
            for n, f in sorted(held ^ named)
        ]
        more = f" and {len(parts) - 20} more" if len(parts) > 20 else ""
        raise InputError(f"{INDEX} and the shards disagree: {', '.join(parts[:20])}{more}.", "Get the checkpoint again.")
    return files
