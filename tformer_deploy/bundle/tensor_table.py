"""The tensor table of ``weights.bin``: the model's parameters in their order, then the rotary frequencies.

A quantised matrix is followed by its scales; see :func:`~tformer_deploy.bundle.quantization.stored_tensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.bundle.manifest import MANIFEST, TensorRecord
from tformer_deploy.bundle.quantization import Quantization, stored_tensors
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.parameters import constant_shapes, parameter_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tformer_deploy.config import DType, ModelConfig

ALIGNMENT = 4096  # a page, so that every tensor can be mapped by itself
_NAMED = 8
_AGAIN = "Export the bundle again."


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor, in the order of the file."""
    return parameter_shapes(config) | constant_shapes(config)


def check_tensor_table(
    config: ModelConfig, dtype: DType, tensors: dict[str, TensorRecord], quantization: Quantization | None = None
) -> None:
    """Refuses a table that is not the config's, or whose tensors overlap.

    Raises:
        InputError: With the first few faults.
    """
    if config.n_layers > len(tensors):  # a manifest may claim two thousand million of them
        raise InputError(f"{MANIFEST}: {len(tensors)} tensors are too few for {config.n_layers} layers.", _AGAIN)
    expected = stored_tensors(config, dtype, quantization)
    faults = [f"{escaped(name)} is not of this model" for name in tensors if name not in expected]
    for name, (shape, want) in expected.items():
        record = tensors.get(name)
        if record is None:
            faults.append(f"{name} is missing")
        elif (record.shape, record.dtype) != (shape, want):
            faults.append(f"{name} is {record.dtype} {list(record.shape)}, expected {want} {list(shape)}")
    if not faults:
        faults = list(_misplaced(tensors))
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise InputError(f"{MANIFEST}: tensors do not fit the config: {'; '.join(faults[:_NAMED])}{more}.", _AGAIN)


def _misplaced(tensors: dict[str, TensorRecord]) -> Iterator[str]:
    end = 0
    for name, record in sorted(tensors.items(), key=lambda item: item[1].offset):
        if record.offset % ALIGNMENT:
            yield f"{name} starts at byte {record.offset}, no multiple of {ALIGNMENT}"
        if record.offset < end:
            yield f"{name} starts at byte {record.offset}, inside the tensor before it"
        end = record.offset + record.size
