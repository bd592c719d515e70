"""A bundle in another dtype, made from a bundle and checked against it: what ``build-engine --dtype`` compiles."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.errors import InputError
from tformer_deploy.exporters.onnx import export_bundle
from tformer_deploy.parity import compare_with_decoder

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.config import DType


class BundleSource:
    """A bundle's weights in the form that the exporter reads from a checkpoint."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self._bundle = bundle
        self.path, self.config = bundle.path, manifest.config
        self.name, self.format, self.family = manifest.source.name, manifest.source.format, manifest.source.family
        self.eos_token_ids, self.bos_token_id = manifest.eos_token_ids, manifest.bos_token_id
        self.tensors = {n: r for n, r in manifest.tensors.items() if n != "rope.frequencies"}
        self._loaded = bundle_backend(bundle).decoder.state_dict()

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._loaded[name]

    def sha256(self) -> str:
        """The core that it is made from."""
        return self._bundle.core_sha256

    def assets(self) -> dict[str, bytes]:
        """Nothing: an engine needs only the graph."""
        return {}


def derive_bundle(bundle: Bundle, dtype: DType, folder: Path) -> tuple[Bundle, dict[str, Any]]:
    """Writes the bundle in ``dtype`` to ``folder`` and compares it with the original's weights in float32.

    Returns:
        The derived bundle, and its record: hashes and every check.

    Raises:
        InputError: A check is red, or a value does not fit ``dtype``.
    """
    export_bundle(BundleSource(bundle), folder, dtype=dtype, max_length=bundle.manifest.max_length, inside_source=True)
    derived = open_bundle(folder, verify="full")
    reference = bundle_backend(bundle).decoder.to(torch.float32)
    checks = compare_with_decoder(reference, derived, dtype)
    red = [c for c in checks if c.verdict == "red"]
    if red:
        lines = "\n  ".join(f"{c.group}, {c.metric}: {c.value:.3g}, gate {c.relation} {c.gate:g}" for c in red)
        raise InputError(f"In {dtype} this model differs from the bundle:\n  {lines}", "Try --dtype bf16, or export from the checkpoint.")
    files = {name: record.sha256 for name, record in sorted(derived.manifest.files.items())}
    return derived, {"dtype": dtype, "from_core": bundle.core_sha256, "files": files, "checks": [dataclasses.asdict(c) for c in checks]}
