"""Opens a folder in the Hugging Face layout: ``config.json`` and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from tformer_deploy.checkpoints.checkpoint import Checkpoint
from tformer_deploy.checkpoints.family import Family, locate
from tformer_deploy.checkpoints.files import listing, read_small
from tformer_deploy.checkpoints.model_config import read_model
from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.checkpoints.safetensors_file import SafetensorsFile
from tformer_deploy.checkpoints.tokens import CONFIG, read_tokens
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PLAIN = re.compile(r"[^./\\\x00][^/\\\x00]{0,199}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_KERNELS = ("_attn_implementation_internal", "_attn_implementation", "attn_implementation")
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
    config = read_model(family.read_config, reader)
    paths, warnings = _weight_files(path)
    located = locate(family, config, _open_all(path, paths), _place(path, paths))
    tokens = read_tokens(path, data, config.vocab_size)
    tokens.warnings = (*reader.warnings, *_ignored_code(path, data), *warnings, *tokens.warnings)
    beside = [path / name for name in (CONFIG, INDEX, *tokens.assets) if (path / name).is_file()]
    return Checkpoint(path, "safetensors", family.name, config, located, tokens, (*beside, *paths))


def _place(path: Path, paths: list[Path]) -> str:
    """The folder and the files in which a missing tensor was looked for."""
    names = [escaped(file.name) for file in paths]
    return f"{escaped(str(path))} ({', '.join(names if len(names) <= 3 else [names[0], '…', names[-1]])})"


def _ignored_code(path: Path, data: dict[str, Any]) -> list[str]:
    """Warns of what names or holds code: none of it is ever imported, downloaded or run."""
    kernels = [k for k in _KERNELS if isinstance(data.get(k), str) and "/" in data[k]]
    warnings = [f"{CONFIG}: {key} names {escaped(data[key])}, which is ignored: no code is fetched or run." for key in kernels]
    scripts = [escaped(name) for name in listing(path) if name.endswith(".py")]
    if scripts:
        warnings.append(
            f"The Python files beside the weights are never run: {', '.join(scripts[:3])}{' …' * (len(scripts) > 3)}."
        )
    return warnings


def _read_config(path: Path) -> bytes:
    if not os.path.lexists(path / CONFIG) and (found := [name for name in listing(path) if name.endswith(".gguf")]):
        raise InputError(f"{escaped(str(path))} has no {CONFIG}.", f"Name the GGUF file itself: {escaped(str(path / found[0]))}.")
    if not os.path.lexists(path / CONFIG) and os.path.lexists(path / "manifest.json"):
        raise InputError(
            f"{escaped(str(path))} is a bundle, not a checkpoint.", "Name what it was made from; `inspect` shows its name."
        )
    return read_small(path / CONFIG, _CONFIG_LIMIT)


def _family(data: dict[str, Any], families: Mapping[str, Family]) -> Family:
    kind = data.get("model_type")
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(
            f"{CONFIG}: model_type is {escaped(repr(kind)[:80])}; supported are {', '.join(families)}.",
            "Use a model of one of these families.",
        )
    names = data.get("architectures")
    if names is not None and family.architectures:
        wrong = names if not isinstance(names, list) else [n for n in names if n not in family.architectures]
        if wrong:
            raise InputError(
                f"{CONFIG}: architectures is {escaped(repr(names)[:200])}; {family.name} may have {', '.join(family.architectures)}.",
                "Use the causal language model of this checkpoint.",
            )
    return family


def _weight_files(path: Path) -> tuple[list[Path], list[str]]:
    """The safetensors files that hold the weights, and warnings about those that do not count."""
    listed = listing(path)
    there = [name for name in listed if name.endswith(".safetensors")]
    if INDEX in listed:
        names = _index_files(path)
    elif SINGLE in there:
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
    if pickles := [escaped(name) for name in listed if name.endswith(_PICKLES)]:
        warnings.append(f"The pickle files beside the safetensors are never opened: {', '.join(pickles[:3])}.")
    return [path / name for name in names], warnings


def _refuse_pickle(path: Path, listed: list[str]) -> None:
    pickles = [name for name in listed if name.endswith((*_PICKLES, ".bin.index.json"))]
    if pickles:
        raise InputError(
            f"{escaped(str(path))} has its weights in {', '.join(map(escaped, pickles[:3]))} only: pickle, which can run code.",
            "Convert it to safetensors, if you trust it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…).",
        )
    foreign = [name for name in listed if name.endswith((".h5", ".msgpack", ".onnx", ".ot", ".npz"))]
    if foreign:
        raise InputError(
            f"{escaped(str(path))} has its weights in {', '.join(map(escaped, foreign[:3]))} only; safetensors and GGUF are read.",
            "Convert it to safetensors with the library that wrote it.",
        )


def _index_files(path: Path) -> list[str]:
    """The shards that the index names, all present.

    Raises:
        InputError: The index is damaged, names a path outside the folder, or a file that is absent.
    """
    named = list(_weight_map(path).values())
    for name in named:
        if not isinstance(name, str) or not _PLAIN.fullmatch(name):
            raise InputError(
                f"{INDEX} names {escaped(repr(name)[:80])}; expected the plain name of a .safetensors file.",
                "Get the index again.",
            )
    names = set(named)
    absent = sorted(escaped(name) for name in names if not os.path.lexists(path / name))
    if absent:
        more = f" and {len(absent) - 20} more" if len(absent) > 20 else ""
        raise InputError(f"{INDEX} names files that are absent: {', '.join(absent[:20])}{more}.", "Complete the download.")
    return sorted(names)


def _weight_map(path: Path) -> dict[str, Any]:
    weight_map = parse_object(read_small(path / INDEX, _INDEX_LIMIT), INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{INDEX} has no weight_map of tensor names to files.", "Get the index again.")
    return weight_map


def _open_all(path: Path, paths: list[Path]) -> list[SafetensorsFile]:
    """The files; with an index, each holds just the tensors that the index says."""
    files = [SafetensorsFile(file) for file in paths]
    if not os.path.lexists(path / INDEX):
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
