"""Weights on few levels: how a matrix is rounded, what calibrates it, and every tensor of a quantised bundle in order."""

from tformer_deploy.quantization.calibration import calibration_rows, dump_rows, read_rows
from tformer_deploy.quantization.rounding import Quantized
from tformer_deploy.quantization.tensors import StoredTensor, WeightSource, quantized_tensors

__all__ = ["Quantized", "StoredTensor", "WeightSource", "calibration_rows", "dump_rows", "quantized_tensors", "read_rows"]
