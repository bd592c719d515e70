"""Weight accounting: every tensor of a bundle against the transformed checkpoint, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.reference.positions import constant_tensors

if TYPE_CHECKING:
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.checkpoints import Checkpoint

_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compare_weights(bundle: Bundle, checkpoint: Checkpoint) -> list[Check]:
    """One check: how many tensors are missing, added or different; their names are its detail."""
    manifest, wrong = bundle.manifest, []
    constants = constant_tensors(checkpoint.config)
    wanted = {*checkpoint.tensors, *constants}
    wrong += [f"{name} is missing" for name in sorted(wanted - set(manifest.tensors))]
    wrong += [f"{name} is in no checkpoint" for name in sorted(set(manifest.tensors) - wanted)]
    if checkpoint.config != manifest.config:
        wrong.append("the config differs from the checkpoint's")
    for name in sorted(wanted & set(manifest.tensors)):
        expected = constants[name] if name in constants else checkpoint.read(name, _TORCH[manifest.dtype])
        if tuple(expected.shape) != manifest.tensors[name].shape:
            wrong.append(f"{name} has shape {list(manifest.tensors[name].shape)}, expected {list(expected.shape)}")
        elif expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes() != bundle.tensor(name).tobytes():
            wrong.append(f"{name} differs")
    more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    detail = "; ".join(wrong[:8]) + more if wrong else f"{len(wanted)} tensors"
    return [
        judge("weights", "tensors compared", len(wanted), 1, ">="),
        judge("weights", "tensors that differ from the checkpoint", len(wrong), 0, "==", detail),
    ]
