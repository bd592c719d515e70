"""Bundles: the folder that holds a model's two graphs, its weights and everything needed to run it."""

from tformer_deploy.bundle.bundle import Bundle, open_bundle
from tformer_deploy.bundle.manifest import Manifest

__all__ = ["Bundle", "Manifest", "open_bundle"]
