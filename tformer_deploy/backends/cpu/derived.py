"""The folder of a bundle's derived graphs in the user's cache: made once, checked before each use, removable at any time."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tformer_deploy.backends.cpu.packed import free_space, room_needed, save_packed, share_weights
from tformer_deploy.backends.cpu.rewrites import (
    fold_grouped_heads,
    fuse_norms,
    look_up_angles,
    take_one_token,
    untie_head,
    use_group_query_attention,
)
from tformer_deploy.backends.graph import import_runtime
from tformer_deploy.bundle.manifest import FileRecord
from tformer_deploy.bundle.verify import cache_folder, hash_file, read_plain_file, verify_file
from tformer_deploy.bundle.writer import new_folder, write_file
from tformer_deploy.errors import InputError, ResourceError
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from tformer_deploy.backends.cpu.plan import CpuPlan, Graph
    from tformer_deploy.bundle import Bundle

RECORD = "derived.json"
_HINT = "Look at the bundle with `tformer-deploy check`, or give --profile portable."
_REVISION = 5  # counts changes of what is derived
_LIMIT = 1 << 20


@dataclass(frozen=True)
class Derived:
    """A checked folder of derived graphs."""

    path: Path

    def graph(self, name: Graph) -> Path:
        """The file of a graph."""
        return self.path / f"{name}.onnx"


def derived_folder(bundle: Bundle) -> Path:
    """Where the derived graphs of a bundle lie: named by its hash, the runtime's version and this CPU."""
    key = json.dumps([bundle.core_sha256, import_runtime().__version__, _cpu(), _REVISION])
    return cache_folder() / "derived" / f"{bundle.core_sha256[:16]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def find_derived(bundle: Bundle, plan: CpuPlan) -> Derived | None:
    """The derived graphs, if they are there and every file is what was written."""
    folder = derived_folder(bundle)
    try:
        record = parse_object(read_plain_file(folder / RECORD, _LIMIT), RECORD)
        files = {name: FileRecord(value["sha256"], value["size"]) for name, value in record["files"].items()}
        if not {f"{name}.onnx" for name in plan.graphs} <= set(files):
            return None
        for name, file in files.items():
            verify_file(folder / name, file, "auto")
    except (InputError, KeyError, TypeError, AttributeError):
        return None
    return Derived(folder)


def derive(bundle: Bundle, plan: CpuPlan, threads: int | None = None) -> Derived:
    """Makes the derived graphs.

    Raises:
        ResourceError: There is no room for them.
        StorageError: They cannot be written, or another process is writing them.
        ImportError: The package onnx is not installed.
        InputError: The decode graph cannot be rewritten, or the runtime refuses it.
    """
    import onnx

    folder = derived_folder(bundle)
    needed = room_needed(sum(t.size for t in bundle.manifest.tensors.values()), len(plan.graphs))
    if (free := free_space(folder)) < needed:
        raise ResourceError(f"{folder.parent} has {free / 2**20:.0f} MiB free; derived graphs need {needed / 2**20:.0f} MiB.")
    config = bundle.manifest.config
    with new_folder(folder, force=True, marker=RECORD) as made:
        for name in plan.graphs:
            try:
                proto = onnx.load(bundle.decode_path, load_external_data=False)
                look_up_angles(proto, config, bundle.path)
                if name == "step":
                    use_group_query_attention(proto, config)
                else:
                    fold_grouped_heads(proto, config)
                    if name == "decode":
                        take_one_token(proto, config)
                fuse_norms(proto)
                untie_head(proto)
                save_packed(proto, bundle.path, made / f"{name}.onnx", threads)
            except Exception as e:  # onnx and the runtime raise many kinds; the graph was edited, or is none of ours
                reason = (str(e).strip().splitlines() or [type(e).__name__])[0][:300]
                raise InputError(f"No graph for this CPU can be derived from {bundle.decode_path}: {reason}", _HINT) from e
        for name in plan.graphs[1:]:
            share_weights(made / "step.onnx", made / f"{name}.onnx")
        files = {path.name: hash_file(path) for path in sorted(made.iterdir())}
        record = {"core_sha256": bundle.core_sha256, "onnxruntime": import_runtime().__version__, "cpu": _cpu()}
        record |= {"reasons": list(plan.reasons)}
        record |= {"files": {name: {"sha256": file.sha256, "size": file.size} for name, file in files.items()}}
        write_file(made / RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
    _give_back()
    return Derived(folder)


def _give_back() -> None:
    """Packing frees three times the weights, which glibc would keep for itself."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def remove_derived(bundle: Bundle) -> bool:
    """Removes a bundle's derived graphs; whether there were any."""
    folder = derived_folder(bundle)
    there = folder.exists()
    shutil.rmtree(folder, ignore_errors=True)
    return there


def _cpu() -> str:
    """The processor's name and features, which decide how weights are packed."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in facts.items()}
    flags = hashlib.sha256(named.get("flags", named.get("Features", "")).encode()).hexdigest()[:12]
    return f"{named.get('model name', platform.machine())} {flags}"
