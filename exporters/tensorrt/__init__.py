"""Bundle → TensorRT engines with fused attention, proven."""

from tformer_deploy.exporters.tensorrt.build import build

__all__ = ["build"]
