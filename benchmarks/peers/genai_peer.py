"""onnxruntime-genai: its model builder (the head on the last position alone, a tied table kept once) and its generator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protocol

if TYPE_CHECKING:
    from protocol import Model, OnStep

REQUIREMENTS = (
    "onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "torch==2.13.0", "transformers==5.24.0", "onnx==1.23.2", "onnx-ir==1.1.0",
)  # fmt: skip
PRECISIONS = ("fp32", "int8", "int4")
PACKAGES = ("onnxruntime-genai", "onnxruntime")


def convert(checkpoint: Path, precision: str, folder: Path) -> None:
    tied = json.loads((checkpoint / "config.json").read_text()).get("tie_word_embeddings", False)
    options = ["prune_lm_head=true", *(["shared_embeddings=true"] if tied else [])]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint), "-o", str(folder)]
    command += ["-p", precision, "-e", "cpu", "-c", str(folder.parent / "genai-cache"), "--extra_options", *options]
    subprocess.run(command, check=True)


def load(folder: Path, precision: str, threads: int) -> Model:
    import onnxruntime_genai

    path = folder / "genai_config.json"
    config = json.loads(path.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    path.write_text(json.dumps(config, indent=1))
    return _Model(onnxruntime_genai.Model(str(folder)))


class _Model:
    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        import numpy as np
        import onnxruntime_genai

        length = len(rows[0]) + new_tokens
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        # The shortest length keeps an end-of-text token from ending a row.
        parameters.set_search_options(do_sample=False, max_length=length, min_length=length, batch_size=len(rows))
        generator = onnxruntime_genai.Generator(self._model, parameters)
        generator.append_tokens(np.array(rows, dtype=np.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
            on_step(generator.get_next_tokens().tolist())


if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
