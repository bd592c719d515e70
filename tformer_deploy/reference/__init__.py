"""The PyTorch model: from the equation in plain Python to the full language model. Needs torch."""

from tformer_deploy.reference.blocks import MultiHeadAttention, TransformerBlock, TransformerConfig, causal_mask
from tformer_deploy.reference.bucketing import bucket_by_length
from tformer_deploy.reference.decoder import Decoder
from tformer_deploy.reference.equation import attention, softmax
from tformer_deploy.reference.fast import CachedAttention, FastAttention

__all__ = [
    "CachedAttention",
    "Decoder",
    "FastAttention",
    "MultiHeadAttention",
    "TransformerBlock",
    "TransformerConfig",
    "attention",
    "bucket_by_length",
    "causal_mask",
    "softmax",
]
