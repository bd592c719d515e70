"""GGUF files, as llama.cpp's converter writes them: one file with one table for each architecture."""

from tformer_deploy.checkpoints.gguf.file import MAGIC
from tformer_deploy.checkpoints.gguf.opening import open_gguf

__all__ = ["MAGIC", "open_gguf"]
