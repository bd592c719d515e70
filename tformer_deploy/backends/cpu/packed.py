"""Optimised graphs of ONNX Runtime whose packed weights lie in one file that several sessions map."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.backends.graph import PROVIDER, WEIGHTS_FOLDER, import_runtime, product_entries

if TYPE_CHECKING:
    from pathlib import Path

_SHARED_FROM = 1024  # bytes; smaller tensors stay in the graph
_PREPACKED = "prepacked_"
_BLOCK = 1 << 22


def save_packed(proto: Any, weights_folder: Path, path: Path, threads: int | None) -> None:
    """Optimises a graph and saves it with its weights as ONNX Runtime packs them, in ``path`` and ``<its stem>.bin`` beside it.

    Args:
        proto: onnx.ModelProto whose weights lie in ``weights_folder``.
        weights_folder: The bundle.
        path: The graph's file.
        threads: As they will be used.
    """
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    options.optimized_model_filepath = str(path)
    for key, value in (
        {
            WEIGHTS_FOLDER: str(weights_folder),
            "session.optimized_model_external_initializers_file_name": f"{path.stem}.bin",
            "session.optimized_model_external_initializers_min_size_in_bytes": str(_SHARED_FROM),
            "session.save_external_prepacked_constant_initializers": "1",
        }
        | product_entries()
    ).items():
        options.add_session_config_entry(key, value)
    runtime.InferenceSession(proto.SerializeToString(), options, providers=[PROVIDER])


@dataclass(frozen=True)
class _Piece:
    """Bytes of a file: as ``offset;length;…`` in a prepacked entry, or the tensor itself."""

    offset: int
    length: int


def share_weights(first: Path, second: Path) -> bool:
    """Points the second graph at the first one's file wherever the bytes are the same, and drops its own file.

    Returns:
        False, and nothing is changed, where a tensor of the second has no equal in the first.
    """
    import onnx

    mine, theirs = (onnx.load(path, load_external_data=False) for path in (second, first))
    sources = {tensor.name: tensor for tensor in theirs.graph.initializer if tensor.external_data}
    own = second.with_suffix(".bin")
    with first.with_suffix(".bin").open("rb") as there, own.open("rb") as here:
        for tensor in mine.graph.initializer:
            if not tensor.external_data:
                continue
            source = sources.get(tensor.name)
            if source is None or not _point_at(tensor, source, here, there):
                return False
    second.write_bytes(mine.SerializeToString(deterministic=True))
    own.unlink()
    return True


def _point_at(tensor: Any, source: Any, here: Any, there: Any) -> bool:
    """Rewrites one tensor's entries; keys of packed pieces stay its own, for they name its operator."""
    entries = {entry.key: entry for entry in tensor.external_data}
    wanted = {entry.key: entry.value for entry in source.external_data}
    if {k for k in entries if k.startswith(_PREPACKED)} - set(wanted):
        return False
    for key, entry in entries.items():
        if key.startswith(_PREPACKED):
            (name, mine), (_, other) = (text.split("|", 1) for text in (entry.value, wanted[key]))
            pairs = zip(_pieces(mine), _pieces(other), strict=False)
            if mine.count("|") != other.count("|") or not all(_same(a, b, here, there) for a, b in pairs):
                return False
            entry.value = f"{name}|{other}"
    pieces = [
        _Piece(int(values["offset"]), int(values["length"])) for values in ({k: e.value for k, e in entries.items()}, wanted)
    ]
    if not _same(pieces[0], pieces[1], here, there):
        return False
    entries["location"].value, entries["offset"].value = wanted["location"], wanted["offset"]
    return True


def _pieces(text: str) -> list[_Piece]:
    return [_Piece(*(int(x) for x in part.split(";")[:2])) for part in text.split("|")]


def _same(a: _Piece, b: _Piece, here: Any, there: Any) -> bool:
    if a.length != b.length:
        return False
    here.seek(a.offset)
    there.seek(b.offset)
    left = a.length
    while left:
        step = min(left, _BLOCK)
        if here.read(step) != there.read(step):
            return False
        left -= step
    return True


def room_needed(weights_bytes: int, graphs: int) -> int:
    """Bytes of disk while packing: each graph's file holds the tensors and their packed form."""
    return graphs * 2 * weights_bytes + (1 << 24)


def free_space(folder: Path) -> int:
    """Bytes free where ``folder`` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
