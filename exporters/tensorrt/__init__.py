"""Bundle → TensorRT engines with fused attention, proven."""

from tformer_deploy.exporters.tensorrt.build import BuiltEngine, build

__all__ = ["BuiltEngine", "build"]
