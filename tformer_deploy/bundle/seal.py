"""Re-hashes a bundle that was edited on purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tformer_deploy.bundle.bundle import MANIFEST_LIMIT, Bundle, open_bundle, require_manifest
from tformer_deploy.bundle.manifest import MANIFEST, FileRecord
from tformer_deploy.bundle.manifest_io import dump_manifest, parse_manifest
from tformer_deploy.bundle.verify import BESIDE_THE_CORE, hash_file, read_plain_file, require_regular, verify_graphs
from tformer_deploy.bundle.writer import MARK, replace_file


def seal(path: str | Path) -> tuple[Bundle, list[str]]:
    """Writes a manifest with the hashes of the files as they are now.

    Returns:
        The bundle, and the names of the files whose record changed. The engines beside the core keep naming the old
        core and are refused from now on.

    Raises:
        InputError: The folder is no bundle, its files do not fit its tensor table, or its graphs do not belong together;
            the manifest is then left as it was.
    """
    root = Path(path)
    require_manifest(root)
    manifest = parse_manifest(read_plain_file(root / MANIFEST, MANIFEST_LIMIT))
    for leftover in root.glob(f"{MARK}*"):  # of a seal that was killed
        leftover.unlink()
    files: dict[str, FileRecord] = {}
    for file in sorted(root.iterdir()):
        if file.name not in {MANIFEST, *BESIDE_THE_CORE}:
            require_regular(file)
            files[file.name] = hash_file(file)
    changed = sorted(name for name in {*files, *manifest.files} if files.get(name) != manifest.files.get(name))
    sealed = replace(manifest, files=files)
    data = dump_manifest(sealed)
    parse_manifest(data)  # refuses a missing graph, or weights shorter than the tensor table
    verify_graphs(root, sealed)
    if changed:
        replace_file(root / MANIFEST, data)
    return open_bundle(root, verify="full"), changed
