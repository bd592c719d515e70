"""Builds one plan in a process of its own: ``python -m tformer_deploy.exporters.tensorrt.worker REQUEST.json``.

A fresh process gives the same bytes for the same input, gives its memory back, and can be stopped at any moment. It
writes JSON lines on stdout: ``progress``, then ``result`` or ``error``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from tformer_deploy.errors import InputError, TformerError
from tformer_deploy.exporters.tensorrt.flavours import Flavour, load_flavour
from tformer_deploy.exporters.tensorrt.fusion import prove_fusion

_PR_SET_PDEATHSIG = 1
# What the library adds on a machine without a driver; the first error is the one that matters.
_NO_DRIVER = re.compile(r"\s*\(?cudaError 35.*", re.DOTALL)


def main() -> int:
    """Reads the request, builds, reports."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":  # a killed parent leaves no builder behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    # The library may print on its own; only JSON lines may reach the parent.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(event: str, **values: Any) -> None:
        pipe.write(json.dumps({"event": event, **values}) + "\n")
        pipe.flush()

    try:
        send("result", **build_plan(load_flavour(request["flavour"]), request, send))
    except TformerError as e:
        send("error", message=e.message, hint=e.hint, exit_code=e.exit_code)
        return 1
    return 0


def build_plan(flavour: Flavour, request: dict[str, Any], send: Any) -> dict[str, Any]:
    """Parses, checks the network, builds, proves fusion, writes the plan."""
    trt = flavour.module
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(flavour.network_flags())
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(request["graph"]) or not network.num_outputs:
        raise InputError(f"TensorRT cannot parse the decode graph: {_parser_error(parser, logger)}")
    attentions, updates = _walk(trt, network, request["decomposable"])
    _require_counts(len(attentions), updates, request["n_layers"])
    _require_quiet(logger)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.progress_monitor = _monitor(trt, send)
    flavour.set_targets(config, tuple(request["targets"]))
    for profile in request["profiles"]:
        config.add_optimization_profile(_profile(builder, network, profile))
    plan = builder.build_serialized_network(network, config)
    _require_quiet(logger)
    if plan is None:
        raise InputError(f"TensorRT cannot build this graph: {logger.first_error()}", _cure(logger.first_error()))
    data = bytes(plan)
    kernels = prove_fusion(data, "\n".join(logger.layers), attentions, [p["name"] for p in request["profiles"]])
    Path(request["plan"]).write_bytes(data)
    return {"attentions": len(attentions), "cache_updates": updates, "kernels": kernels}


def _walk(trt: Any, network: Any, decomposable: bool) -> tuple[list[str], int]:
    """ONNX names of the attention layers, and the number of cache updates."""
    attentions, updates = [], 0
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            updates += 1
        elif layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            if decomposable:  # the unfused control of the tests
                layer.attention.decomposable = True
            elif layer.attention.decomposable:
                raise InputError(f"Attention {layer.name} is marked decomposable: it would be built unfused without a word.")
            attentions.append(layer.name.removesuffix("_AttentionInput"))
    return attentions, updates


def _require_counts(attentions: int, updates: int, n_layers: int) -> None:
    if (attentions, updates) != (n_layers, 2 * n_layers):
        raise InputError(
            f"The parsed network has {attentions} attentions and {updates} cache updates; expected {n_layers} and {2 * n_layers}.",
            "Export the bundle again.",
        )


def _require_quiet(logger: Any) -> None:
    """An input that the parser drops would change what the graph computes."""
    unused = [text for text in logger.complaints if "Unused Input" in text]
    if unused:
        raise InputError(f"TensorRT drops an input of the graph: {unused[0]}")


def _profile(builder: Any, network: Any, profile: dict[str, Any]) -> Any:
    result = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shapes = []
        for batch, sequence in zip(profile["batch"], profile["sequence"], strict=True):
            leading = {"input_ids": (batch, sequence), "past_lengths": (batch,), "logit_positions": (batch, 1)}
            shapes.append(leading.get(tensor.name, (batch, *tuple(tensor.shape)[1:])))
        result.set_shape(tensor.name, *shapes)
    return result


def _parser_error(parser: Any, logger: Any) -> str:
    if parser.num_errors:
        error = parser.get_error(0)
        return f"node {error.node_name() or error.node()} ({error.node_operator()}): {_NO_DRIVER.sub('', error.desc())}"
    return str(logger.first_error())


def _cure(error: str) -> str:
    if "dedicated kernel" in error:
        return "Build in fp16 or bf16, or with a smaller --capacity."
    if "memory" in error.lower():
        return "Give the builder more memory, or lower --max-batch and --prompt-bucket."
    return "Run `tformer-deploy check` on the bundle, then report what it and this command print."


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps complaints and the list of layers; one logger a process."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.complaints: list[str] = []
            self.errors: list[str] = []
            self.layers: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if text.startswith("Layers:"):
                self.layers.append(text)
            elif severity <= trt.ILogger.WARNING:
                self.complaints.append(text)
                if severity <= trt.ILogger.ERROR:
                    self.errors.append(_NO_DRIVER.sub("", text))

        def first_error(self) -> str:
            return self.errors[0] if self.errors else "it gave no reason."

    return Logger()


def _monitor(trt: Any, send: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """Passes the builder's phases on."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            if parent is None:
                send("progress", phase=phase, step=0, of=steps)

        def step_complete(self, phase: str, step: int) -> bool:
            send("progress", phase=phase, step=step + 1, of=self.steps.get(phase, 0))
            return True

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


if __name__ == "__main__":
    sys.exit(main())
