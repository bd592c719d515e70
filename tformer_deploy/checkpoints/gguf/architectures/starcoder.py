"""Architecture ``starcoder`` (GPTBigCode): GPT-2 with one key/value head for all queries."""

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.architectures.gpt2 import read_config

STARCODER = Architecture("gpt_bigcode", read_config, split_or_fused)
