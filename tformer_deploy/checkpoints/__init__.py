"""Checkpoints of foreign and of our own making, read strictly into our words."""

from tformer_deploy.checkpoints.checkpoint import Checkpoint, TensorSpec
from tformer_deploy.checkpoints.opening import open_checkpoint

__all__ = ["Checkpoint", "TensorSpec", "open_checkpoint"]
