"""transformers: eager PyTorch, sdpa attention, a growing cache, the head on the last position alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protocol

if TYPE_CHECKING:
    from protocol import Model, OnStep

REQUIREMENTS = ("torch==2.13.0", "transformers==5.24.0", "safetensors", "numpy")
PRECISIONS = ("fp32",)
PACKAGES = ("transformers", "torch")


def convert(checkpoint: Path, precision: str, folder: Path) -> None:
    """Nothing: the checkpoint is its form. The folder says where that is."""
    folder.mkdir(parents=True)
    (folder / "checkpoint").write_text(str(checkpoint.resolve()))


def load(folder: Path, precision: str, threads: int) -> Model:
    import torch

    transformers: Any = importlib.import_module("transformers")

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    path = (folder / "checkpoint").read_text()
    return _Model(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval())


class _Model:
    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        import torch

        ids, cache = torch.tensor(rows), None
        with torch.inference_mode():
            for _ in range(new_tokens):
                out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                on_step(ids[:, 0].tolist())


if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
