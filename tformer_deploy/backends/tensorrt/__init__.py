"""TensorRT engines of a bundle, executed. Importing this loads neither TensorRT nor CUDA."""

from __future__ import annotations

from tformer_deploy.backends.tensorrt.backend import TensorRTBackend
from tformer_deploy.backends.tensorrt.opening import open_tensorrt

__all__ = ["TensorRTBackend", "open_tensorrt"]
