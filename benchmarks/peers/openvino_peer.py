"""OpenVINO: exported by optimum-intel, run as a stateful model that gives logits of the last position alone.

fp32 is computed in float32; compressed weights in what the plugin prefers on the processor (bfloat16 where it has it), as it comes.
"""

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
    "openvino==2026.4.1", "optimum-intel[openvino]==2.2.0", "nncf", "torch==2.13.0",
)  # fmt: skip
# Comes with optimum-intel for vision; on a torch built for CPUs, a build for GPUs of it keeps transformers from being imported.
REMOVED = ("torchvision",)
PRECISIONS = ("fp32", "int8", "int4")
PACKAGES = ("openvino", "optimum-intel", "nncf")


def convert(checkpoint: Path, precision: str, folder: Path) -> None:
    program = Path(sys.executable).with_name("optimum-cli")
    command = [str(program), "export", "openvino", "--model", str(checkpoint), "--task", "text-generation-with-past"]
    command += ["--weight-format", precision, "--disable-convert-tokenizer"]
    if precision == "int4":
        config = json.loads((checkpoint / "config.json").read_text())
        width = config.get("hidden_size") or config["n_embd"]
        # 128 is its default, and an error where it does not divide the width.
        command += ["--group-size", str(next(size for size in (128, 64, 32, -1) if width % size == 0))]
    subprocess.run([*command, str(folder)], check=True)


def load(folder: Path, precision: str, threads: int) -> Model:
    import openvino

    core = openvino.Core()
    model = core.read_model(str(folder / "openvino_model.xml"))
    _keep_last_position(model)
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if precision == "fp32":
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    return _Model(core.compile_model(model, "CPU", settings))


def _keep_last_position(model: Any) -> None:
    """Slices the last position before the head's product, as openvino-genai's pipeline does."""
    import numpy as np
    from openvino import opset13

    product = model.output("logits").get_node().input_value(0).get_node()
    while product.get_type_name() != "MatMul":
        product = product.input_value(0).get_node()
    start, stop, step, axis = (opset13.constant(np.array([n], dtype=np.int64)) for n in (-1, np.iinfo(np.int64).max, 1, 1))
    last = opset13.slice(product.input_value(0), start, stop, step, axis)
    product.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


class _Model:
    def __init__(self, compiled: Any) -> None:
        self._request = compiled.create_infer_request()
        self._inputs = {name for port in compiled.inputs for name in port.names}

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        import numpy as np

        self._request.reset_state()
        ids, past = np.array(rows, dtype=np.int64), 0
        for _ in range(new_tokens):
            batch, width = ids.shape
            inputs = {
                "input_ids": ids,
                "attention_mask": np.ones((batch, past + width), dtype=np.int64),
                "position_ids": np.tile(np.arange(past, past + width, dtype=np.int64), (batch, 1)),
                "beam_idx": np.arange(batch, dtype=np.int32),
            }
            self._request.infer({name: array for name, array in inputs.items() if name in self._inputs})
            logits = self._request.get_tensor("logits").data
            ids, past = logits[:, -1].argmax(-1)[:, None].astype(np.int64), past + width
            on_step(ids[:, 0].tolist())


if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
