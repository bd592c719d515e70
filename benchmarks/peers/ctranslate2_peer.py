"""CTranslate2: its converter from transformers and its generator, with a callback for each token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protocol

if TYPE_CHECKING:
    from protocol import Model, OnStep

REQUIREMENTS = ("ctranslate2==4.8.5", "torch==2.13.0", "transformers==5.24.0", "numpy")
PRECISIONS = ("fp32", "int8")
PACKAGES = ("ctranslate2",)
_TYPES = {"fp32": "float32", "int8": "int8"}


def convert(checkpoint: Path, precision: str, folder: Path) -> None:
    program = Path(sys.executable).with_name("ct2-transformers-converter")
    command = [str(program), "--model", str(checkpoint), "--output_dir", str(folder), "--quantization", _TYPES[precision]]
    subprocess.run(command, check=True)


def load(folder: Path, precision: str, threads: int) -> Model:
    import ctranslate2

    generator = ctranslate2.Generator(
        str(folder), device="cpu", compute_type=_TYPES[precision], inter_threads=1, intra_threads=threads
    )
    return _Model(generator, json.loads((folder / "vocabulary.json").read_text("utf-8")))


class _Model:
    def __init__(self, generator: Any, vocabulary: list[str]) -> None:
        self._generator, self._vocabulary = generator, vocabulary

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        prompts = [[self._vocabulary[token] for token in row] for row in rows]
        step: dict[int, int] = {}

        def on_token(result: Any) -> bool:
            step[result.batch_id] = result.token_id
            if len(step) == len(rows):
                on_step([step[i] for i in range(len(rows))])
                step.clear()
            return False

        self._generator.generate_batch(
            prompts, beam_size=1, sampling_topk=1, max_length=new_tokens, min_length=new_tokens, include_prompt_in_result=False,
            callback=on_token,
        )  # fmt: skip


if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
