"""Decoder → prefill and decode graphs → bundle."""

from tformer_deploy.exporters.onnx.export import export_bundle

__all__ = ["export_bundle"]
