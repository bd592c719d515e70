"""Builds one plan in a process of its own: ``python -m tformer_deploy.exporters.tensorrt.worker DESCRIPTOR < request``.

It starts in the folder of the graph and its weights, and writes the plan to an open file descriptor.

A fresh process whose addresses are not randomised, and whose threads do not race, gives the same bytes for the same input
nearly always (docs/engines.md has figures; a second build in one process never does), gives its memory back, and can be stopped at any
moment. It writes JSON lines on stdout: ``progress``, then ``result`` or ``error``. The plan is written only when fusion is
proven.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tformer_deploy.bundle.engine_record import attention_layers
from tformer_deploy.errors import InputError, ResourceError, StorageError, TformerError
from tformer_deploy.exporters.tensorrt.flavours import Flavour, load_flavour
from tformer_deploy.exporters.tensorrt.fusion import ProofTarget, prove_by_inspector, prove_fusion, unpacked_matrices
from tformer_deploy.exporters.tensorrt.graph import fixed_graph, quantised_products
from tformer_deploy.exporters.tensorrt.monitor import progress_monitor

_PR_SET_PDEATHSIG = 1
_QUERY, _ADDR_NO_RANDOMIZE = 0xFFFFFFFF, 0x0040000  # personality(2)
_RESTARTED = "TFORMER_DEPLOY_WORKER_RESTARTED"
# What the library adds on a machine without a driver; the first error is the one that matters.
_NO_DRIVER = re.compile(r"\s*\(?cudaError 35.*", re.DOTALL)
_SOURCE_PLACE = re.compile(r"\s*In \w+ at \S+:\d+\)?\s*$")


def main() -> int:
    """Reads the request, builds, reports."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent leaves no builder behind
        if _RESTARTED not in os.environ and fix_addresses():
            # It takes effect at the next exec; the pipe and the signal above outlive that.
            command = [sys.executable, "-P", "-m", "tformer_deploy.exporters.tensorrt.worker", *sys.argv[1:]]
            os.execve(sys.executable, command, os.environ | {_RESTARTED: "1", "PYTHONHASHSEED": "0"})
        take_turns()
    request = json.loads(sys.stdin.buffer.read())
    # The library may print on its own; only JSON lines may reach the parent.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(event: str, **values: Any) -> None:
        pipe.write(json.dumps({"event": event, **values}) + "\n")
        pipe.flush()

    try:
        flavour = load_flavour(request["flavour"])
        # A new thread allocates in a region of its own: what was allocated before, variables and paths among it, moves nothing there.
        with ThreadPoolExecutor(1) as apart:
            found = apart.submit(build_plan, flavour, request, int(sys.argv[1]), send).result()
        send("result", **found)
    except TformerError as e:
        send("error", message=e.message, hint=e.hint, exit_code=e.exit_code)
        return 1
    except MemoryError:
        send("error", message="Memory ran out while building.", hint=_LESS, exit_code=ResourceError.exit_code)
        return 1
    except OSError as e:
        hint = "Make room on the disk, or lift the limit on the size of a file."
        send("error", message=f"The plan cannot be written: {e.strerror or e}.", hint=hint, exit_code=StorageError.exit_code)
        return 1
    return 0


def fix_addresses() -> bool:
    """Asks Linux not to randomise addresses, on which the builder's order of work depends; False where it may not."""
    personality = ctypes.CDLL(None).personality
    personality.argtypes, personality.restype = [ctypes.c_ulong], ctypes.c_int
    current = personality(_QUERY)
    return current != -1 and personality(current | _ADDR_NO_RANDOMIZE) != -1


def take_turns() -> None:
    """Makes the builder's threads race less: on one CPU, where a new one does not interrupt the one before.

    It starts up to four at a time for each kernel. Which memory a thread gets depends on which ended before, and addresses decide
    the builder's order of work: left to race, one build in three of a larger model differs in some bytes.
    """
    with contextlib.suppress(OSError):  # a system that forbids it builds all the same
        current = ctypes.CDLL(None).sched_getcpu()
        os.sched_setaffinity(0, {current} if current >= 0 else os.sched_getaffinity(0))
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def build_plan(flavour: Flavour, request: dict[str, Any], output: int, send: Any) -> dict[str, Any]:
    """Parses, checks the network, builds, proves fusion, writes the plan.

    Args:
        flavour: Which TensorRT.
        request: graph (name of a file here), square (attention over the fresh keys alone), capacity, n_layers,
            compute_capabilities, profiles, expand_attention (the graph has no attention layer any more), decomposable
            (every attention may be built unfused), may_decompose (phases in which that is recorded; in the others it is a fault).
        output: Descriptor of the file for the plan.
        send: Reports progress.

    Raises:
        InputError: The graph cannot be built, an input of it is dropped, or an attention is not fused.
    """
    trt = flavour.module
    logger = _logger(trt)
    builder = trt.Builder(logger)
    network = builder.create_network(flavour.network_flags())
    graph = fixed_graph(Path(request["graph"]), request["capacity"], request["expand_attention"])
    graph_sha256, products = hashlib.sha256(graph).hexdigest(), quantised_products(graph)
    attentions = _parse(flavour, network, logger, request, graph)
    del graph  # a padded table lies in it
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    monitor = progress_monitor(trt, lambda phase, done: send("progress", phase=phase, done=done))
    config.progress_monitor = monitor
    flavour.set_targets(config, tuple(request["compute_capabilities"]))
    for profile in request["profiles"]:
        config.add_optimization_profile(_profile(builder, network, profile))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise InputError(f"TensorRT cannot build this graph: {logger.first_error()}", _cure(logger.first_error()))
    require_no_unused_input(logger)
    data = memoryview(plan)
    targets = [
        ProofTarget(p["name"], p["sequence"] == [1, 1, 1], p["phase"] in request["may_decompose"]) for p in request["profiles"]
    ]
    log, inspected = "\n".join(logger.layers), flavour.inspect(data, logger)
    if inspected is None:
        ways, proofs = ["plan", "log"], prove_fusion(data, log, attentions, targets)
    else:
        proofs, agrees = prove_by_inspector(inspected, log, attentions, targets)
        ways = ["inspector", "log"] if agrees else ["inspector"]
    unpacked = unpacked_matrices(inspected or log, products, len(targets))
    proofs = [dataclasses.replace(proof, unpacked=names) for proof, names in zip(proofs, unpacked, strict=True)]
    with os.fdopen(output, "wb") as file:
        file.write(data)
    return {
        "ways": ways,
        "graph_sha256": graph_sha256,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": data.nbytes,
        "cache_updates": 2 * len(attentions),
        "proofs": [dataclasses.asdict(p) for p in proofs],
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    """Peak memory of this process alone; getrusage would count what its parent had when it was forked. 0 where unknown."""
    try:
        text = Path("/proc/self/status").read_text("ascii")
    except OSError:
        return 0.0
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return round(int(found.group(1)) / 2**10, 1) if found else 0.0


def _parse(flavour: Flavour, network: Any, logger: Any, request: dict[str, Any], graph: bytes) -> list[str]:
    """Fills the network; returns the names of its attentions."""
    trt, path = flavour.module, Path(request["graph"])
    parser = trt.OnnxParser(network, logger)
    # Weights are found beside the graph, here. Junk parses as an empty network, hence the count of outputs.
    if not parser.parse(graph, path.name) or not network.num_outputs:
        error = _parser_error(parser, logger)
        raise InputError(f"TensorRT cannot parse {path}: {error}", _cure(error))
    require_no_unused_input(logger)
    attentions, updates = walk(flavour, network, request["decomposable"], request["square"])
    n_layers = request["n_layers"]
    n_attentions = 0 if request["expand_attention"] else n_layers
    if (len(attentions), updates) != (n_attentions, 2 * n_layers):
        found, expected = f"{len(attentions)} attentions and {updates} cache updates", f"{n_attentions} and {2 * n_layers}"
        raise InputError(f"The parsed network has {found}; expected {expected}.", "Export the bundle again.")
    return attention_layers(n_layers)


def walk(flavour: Flavour, network: Any, decomposable: bool, square: bool) -> tuple[list[str], int]:
    """Our names of the attention layers, and the number of cache updates.

    Raises:
        InputError: An attention may be built unfused, or hides nothing.
    """
    trt, attentions, updates = flavour.module, [], 0
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            updates += 1
        elif layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            attention = layer.attention
            if decomposable:
                attention.decomposable = True
            elif attention.decomposable:
                raise InputError(
                    f"Attention {attention.name} is marked decomposable: it would be built unfused without a word.",
                    "Export the bundle again.",
                )
            if not flavour.masks(attention, square):
                raise InputError(
                    f"Attention {attention.name} has no mask: it would see the wrong slots of the cache.",
                    "Export the bundle again.",
                )
            attentions.append(str(attention.name))
    return attentions, updates


def require_no_unused_input(logger: Any) -> None:
    """An input that the parser drops would change what the graph computes."""
    if unused := [text for text in logger.complaints if "unused input" in text.lower()]:
        raise InputError(f"TensorRT drops an input of the graph: {unused[0]}", "Export the bundle again.")


def _profile(builder: Any, network: Any, profile: dict[str, Any]) -> Any:
    result = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        shapes = []
        for batch, sequence, logits in zip(profile["batch"], profile["sequence"], profile["logits"], strict=True):
            leading = {"input_ids": (batch, sequence), "past_lengths": (batch,), "logit_positions": (batch, logits)}
            shapes.append(leading.get(tensor.name, (batch, *tuple(tensor.shape)[1:])))
        result.set_shape(tensor.name, *shapes)
    return result


def _parser_error(parser: Any, logger: Any) -> str:
    if parser.num_errors:
        error = parser.get_error(0)
        return f"node {error.node_name() or error.node()} ({error.node_operator()}): {_tidy(error.desc())}"
    return str(logger.first_error())


def _tidy(text: str) -> str:
    return _SOURCE_PLACE.sub("", _NO_DRIVER.sub("", text)).strip()


_LESS = "Give the builder more memory, or lower --max-batch and --prompt-bucket."
# What errors of the parser and the builder are known to mean: a pattern, and what to do.
_CURES = (
    (r"dedicated kernel", "Build in fp16 or bf16, with a smaller --capacity, or with --allow-decomposed."),
    (r"softcap", "Run this bundle on ONNX Runtime, or give --allow-decomposed."),
    (
        r"no importer registered|unsupported operator|no op(?:erator)? registered",
        "Install a newer TensorRT: this one does not know that operator.",
    ),
    (r"memory|bad_alloc", _LESS),
    (
        r"external|weights file|failed to open|could not open",
        "Run `tformer-deploy inspect` on the bundle: it verifies its files.",
    ),
    (
        r"Myelin\w*Exception",
        "A check inside TensorRT's compiler failed: try another --max-batch, or a bundle exported with another --block or --dtype.",
    ),
    (r"compute capability|\bsm_?\d\d", "Leave --target out, or name the GPUs that this TensorRT supports."),
)


def _cure(error: str) -> str:
    for pattern, cure in _CURES:
        if re.search(pattern, error, re.IGNORECASE):
            return cure
    return "Run `tformer-deploy check` on the bundle; report what it and this command print."


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
                    self.errors.append(_tidy(text))

        def first_error(self) -> str:
            return self.errors[0] if self.errors else "it gave no reason."

    return Logger()


if __name__ == "__main__":
    sys.exit(main())
