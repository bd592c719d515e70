"""Refuses a bundle whose numbers are not numbers, before anything is generated with it.

Not part of opening: ``check`` must be able to look at such a bundle and call it red.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.bundle.graph_file import read_graph_file
from tformer_deploy.bundle.manifest import WEIGHTS
from tformer_deploy.bundle.quantization import WHOLE
from tformer_deploy.bundle.signature import PHASES
from tformer_deploy.bundle.verify import remember, remembered
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from tformer_deploy.bundle.bundle import Bundle

# dtype → integer type of that width, and the bits that are all set in NaN and infinity.
_EXPONENTS = {"fp32": ("<u4", 0x7F800000), "fp16": ("<u2", 0x7C00), "bf16": ("<u2", 0x7F80)}
_CHUNK = 4 << 20
_HINT = "Export it again from an undamaged checkpoint."


def require_finite(bundle: Bundle) -> None:
    """Looks at every constant of the graphs and every weight; a large unchanged file is read once on this machine.

    Raises:
        InputError: One is NaN or infinite; its name and how many are in the message.
    """
    for phase in PHASES:
        path = bundle.path / f"{phase}.onnx"
        if faults := read_graph_file(path).non_finite:
            raise InputError(f"{escaped(str(path))}: {faults[0]}", _HINT)
    status, record = bundle.weights_path.stat(), bundle.manifest.files[WEIGHTS]
    if remembered(bundle.weights_path, status, record, "finite"):
        return
    with bundle.weights_path.open("rb") as file:
        for name, tensor in bundle.manifest.tensors.items():
            if tensor.dtype in WHOLE:
                continue  # whole numbers are always finite; their scales are tensors of their own
            kind, exponent = _EXPONENTS[tensor.dtype]
            file.seek(tensor.offset)
            bad, left = 0, tensor.size
            while left and (chunk := file.read(min(_CHUNK, left))):
                left -= len(chunk)
                bits = np.frombuffer(chunk, kind)
                bad += int(np.count_nonzero((bits & exponent) == exponent))
            if bad:
                place = f"{escaped(str(bundle.weights_path))}: tensor {escaped(name)}"
                raise InputError(f"{place} holds {bad} NaN or infinite values.", _HINT)
    remember(bundle.weights_path, status, record, "finite")
