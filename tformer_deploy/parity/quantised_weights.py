"""Weight accounting of a quantised bundle: what its quantiser makes of the checkpoint, recomputed, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tformer_deploy.bundle.quantization import CALIBRATION, is_matrix, scale_name, stored_tensors
from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.quantization import StoredTensor, quantized_tensors, read_rows
from tformer_deploy.quantization.rounding import Quantized
from tformer_deploy.quantization.tensors import read_matrix
from tformer_deploy.reference.positions import constant_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.checkpoints import Checkpoint
    from tformer_deploy.quantization.calibration import Rows

_NAMED = 8
# Sums in another order (another CPU, other threads) may move a value that lies between two levels to the other one, and all
# later ones of that output with it. Such an output is as good as ours, and there are few of them.
_OTHER_OUTPUTS = 1e-3
_AS_GOOD = 1.5


def compare_quantised_weights(bundle: Bundle, checkpoint: Checkpoint, on_part: Callable[[str], None]) -> list[Check]:
    """How many tensors are missing, added or different; of a calibrated bundle also outputs that are rounded otherwise."""
    manifest, quantization = bundle.manifest, bundle.manifest.quantization
    assert quantization is not None
    wanted, found = stored_tensors(checkpoint.config, manifest.dtype, quantization), manifest.tensors
    wrong = [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
    wrong += [f"{name} is in no checkpoint" for name in sorted(set(found) - set(wanted))]
    if checkpoint.config != manifest.config:
        wrong.append("the config differs from the checkpoint's")
    shapes = {
        name
        for name, (shape, dtype) in wanted.items()
        if name in found and (found[name].shape, found[name].dtype) != (shape, dtype)
    }
    wrong += [f"{name} is {found[name].dtype} {list(found[name].shape)}" for name in sorted(shapes)]
    outputs = other = 0
    if not wrong:
        rows = calibration_of(bundle)
        pending: StoredTensor | None = None
        for stored in _expected(checkpoint, bundle, rows, on_part):
            if is_matrix(stored.name):
                pending = stored
                continue
            if pending is not None and stored.name == scale_name(pending.name):
                outputs += stored.tensor.shape[1]
                differing, worse = _compare_matrix(bundle, checkpoint, pending, stored.tensor)
                if differing and (worse or rows is None):
                    wrong.append(f"{pending.name} differs in {differing} of {stored.tensor.shape[1]} outputs")
                other += differing
                pending = None
            elif _bytes(stored.tensor) != bundle.tensor(stored.name).tobytes():
                wrong.append(f"{stored.name} differs")
    more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    detail = "; ".join(wrong[:_NAMED]) + more if wrong else f"{len(wanted)} tensors"
    checks = [
        judge("weights", "tensors compared", len(wanted), 1, ">="),
        judge("weights", "tensors that differ from the rounded checkpoint", len(wrong), 0, "==", detail),
    ]
    if quantization.calibration is not None and outputs:
        share = other / outputs
        checks.append(
            judge("weights", "share of outputs rounded otherwise", share, _OTHER_OUTPUTS, "<=", f"{other} of {outputs}")
        )
    return checks


def calibration_of(bundle: Bundle) -> Rows | None:
    """The rows that a bundle was rounded for, or None.

    Raises:
        InputError: They are damaged.
    """
    quantization = bundle.manifest.quantization
    if quantization is None or quantization.calibration is None:
        return None
    data = bundle.asset(CALIBRATION)
    assert data is not None  # the manifest's reader saw to it
    return read_rows(data, quantization.calibration, bundle.manifest.config)


def _expected(
    checkpoint: Checkpoint, bundle: Bundle, rows: Rows | None, on_part: Callable[[str], None]
) -> Iterator[StoredTensor]:
    quantization = bundle.manifest.quantization
    assert quantization is not None
    yield from quantized_tensors(checkpoint, quantization, rows, on_part)
    for name, tensor in constant_tensors(checkpoint.config).items():
        yield StoredTensor(name, "fp32", tensor)


def _compare_matrix(bundle: Bundle, checkpoint: Checkpoint, values: StoredTensor, scales: Tensor) -> tuple[int, int]:
    """Outputs of a matrix that differ from what was recomputed, and how many of those are further from the checkpoint."""
    stored = Quantized(_tensor(bundle.tensor(values.name)), _tensor(bundle.tensor(scale_name(values.name))))
    wanted = Quantized(values.tensor, scales)
    differs = (stored.values != wanted.values).any(0) | (stored.scales.view(torch.int32) != scales.view(torch.int32)).any(0)
    count = int(differs.sum())
    if not count:
        return 0, 0
    weight = read_matrix(checkpoint, values.name)
    errors = [(q.dequantized()[: len(weight)] - weight)[:, differs].double().square().sum(0) for q in (stored, wanted)]
    return count, int((~(errors[0] <= _AS_GOOD * errors[1])).sum())


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
