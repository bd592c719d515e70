"""Re-hashes a bundle that was edited on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tformer_deploy.bundle.bundle import Bundle, open_bundle
from tformer_deploy.bundle.manifest import MANIFEST, FileRecord
from tformer_deploy.bundle.manifest_io import dump_manifest, parse_manifest
from tformer_deploy.bundle.verify import BESIDE_THE_CORE, hash_file, read_plain_file
from tformer_deploy.bundle.writer import replace_file
from tformer_deploy.errors import InputError


def seal(path: str | Path) -> tuple[Bundle, list[str]]:
    """Writes a manifest with the hashes of the files as they are now.

    Returns:
        The bundle, and the names of the files whose record changed. The engines beside the core keep naming the old
        core and are refused from now on.

    Raises:
        InputError: The folder is no bundle, or its files do not fit its tensor table.
    """
    root = Path(path)
    if not (root / MANIFEST).exists():
        raise InputError(f"{root} is no bundle: it has no {MANIFEST}.", "Make one with `tformer-deploy export`.")
    manifest = parse_manifest(read_plain_file(root / MANIFEST, 64 * 2**20))
    names = {p.name for p in root.iterdir()} - {MANIFEST, *BESIDE_THE_CORE}
    files: dict[str, FileRecord] = {}
    for name in sorted(names):
        if (root / name).is_symlink() or not (root / name).is_file():
            raise InputError(f"{root / name} is no regular file.", "Remove it, or copy the file itself into the bundle.")
        files[name] = hash_file(root / name)
    changed = sorted(name for name in {*files, *manifest.files} if files.get(name) != manifest.files.get(name))
    data = dump_manifest(replace(manifest, files=files))
    parse_manifest(data)  # refuses a missing graph, or weights shorter than the tensor table
    if changed:
        replace_file(root / MANIFEST, data)
    return open_bundle(root, verify="full"), changed
