"""What ``build-engine`` adds to TensorRT's own builder: seconds and memory for the same graph, in turn.

    python benchmarks/engine_build.py BUNDLE [--layout shared] [--capacity N] [--rounds 3]

bare: a process that imports TensorRT, parses the graph, adds the same profiles, builds and writes the plan; nothing else.
ours: the command ``tformer-deploy build-engine``, from its start to its end: it verifies the bundle, proves fusion, hashes
and seals. Its memory is the builder's process and the command's own, added. BUNDLE is copied by links and stays as it is; its dtype
must be the engine's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.manifest import WEIGHTS
from tformer_deploy.exporters.tensorrt.flavours import load_flavour
from tformer_deploy.exporters.tensorrt.graph import fixed_graph
from tformer_deploy.exporters.tensorrt.preflight import PlanPart, make_plan

LIMIT = 1.15
# No line of it is ours: what anyone would write first.
BARE = """
import json, sys
import tensorrt_rtx as trt
profiles, capabilities = json.loads(sys.argv[3]), json.loads(sys.argv[4])
logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file(sys.argv[1])
config = builder.create_builder_config()
config.num_compute_capabilities = len(capabilities)
for i, capability in enumerate(capabilities):
    config.set_compute_capability(getattr(trt.ComputeCapability, "SM" + capability.replace(".", "")), i)
for shapes in profiles:
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        rows = shapes["batch"]
        leading = {
            "input_ids": list(zip(rows, shapes["sequence"])), "past_lengths": [(b,) for b in rows],
            "logit_positions": list(zip(rows, shapes["logits"])),
        }
        profile.set_shape(tensor.name, *leading.get(tensor.name, [(b, *tuple(tensor.shape)[1:]) for b in rows]))
    config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config)
with open(sys.argv[2], "wb") as file:
    file.write(plan)
"""


def measure(command: list[str]) -> tuple[float, float, str]:
    """Seconds of a process, its own peak memory in MiB, and its stdout."""
    started, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            peak = max(peak, _high_water(process.pid))
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        if process.returncode:
            raise SystemExit(f"{' '.join(command[:4])} … ended with {process.returncode}")
        out.seek(0)
        return seconds, peak, out.read()


def _high_water(pid: int) -> float:
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text("ascii"), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found.group(1)) / 2**10 if found else 0.0


def bare(folder: Path, parts: tuple[PlanPart, ...], capabilities: tuple[str, ...]) -> dict[str, float]:
    """The builder alone, a process a plan."""
    seconds, peaks, size = 0.0, [], 0
    for part in parts:
        plan, profiles = folder / f"{part.name}.plan", [vars(p) for p in part.profiles]
        graph = folder / f"{part.graph}.onnx"
        command = [sys.executable, "-c", BARE, str(graph), str(plan), json.dumps(profiles), json.dumps(capabilities)]
        spent, peak, _ = measure(command)
        seconds, size = seconds + spent, size + plan.stat().st_size
        peaks.append(peak)
        plan.unlink()
    return {"s": seconds, "mib": max(peaks), "plan_mib": size / 2**20}


def ours(bundle: Path, arguments: list[str]) -> dict[str, float]:
    """The command."""
    command = [sys.executable, "-m", "tformer_deploy.cli", "build-engine", str(bundle), "--force", "--json", *arguments]
    seconds, peak, out = measure(command)
    found = json.loads(out)
    plans = sum(plan["size"] for plan in found["plans"])
    return {"s": seconds, "mib": found["peak_mib"] + peak, "builder_mib": found["peak_mib"], "plan_mib": plans / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--layout", choices=["shared", "split", "decode"], default="shared")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    bundle, flavour = open_bundle(options.bundle), load_flavour("rtx")
    plan = make_plan(bundle.manifest, bundle.manifest.dtype, options.capacity, 8, (), options.layout)
    capabilities = flavour.compute_capabilities(())
    arguments = ["--layout", options.layout, "--capacity", str(plan.capacity), "--flavour", "rtx"]
    rounds: dict[str, list[dict[str, float]]] = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-", dir=bundle.path.resolve().parent) as scratch:
        folder, copy = Path(scratch) / "bare", Path(scratch) / "ours"
        folder.mkdir()
        (folder / WEIGHTS).symlink_to(bundle.weights_path.resolve())
        for part in plan.parts:
            (folder / f"{part.graph}.onnx").write_bytes(fixed_graph(bundle.path / f"{part.graph}.onnx", plan.capacity))
        subprocess.run(["cp", "-r", str(bundle.path.resolve()), str(copy)], check=True)  # a bundle refuses links
        for _ in range(options.rounds):
            rounds["bare"].append(bare(folder, plan.parts, capabilities))
            rounds["ours"].append(ours(copy, arguments))
    report(bundle.manifest.source.name, plan.layout, plan.capacity, rounds)


def report(name: str, layout: str, capacity: int, rounds: dict[str, list[dict[str, float]]]) -> None:
    """A table, and one line of JSON."""
    medians = {who: {key: statistics.median(r[key] for r in found) for key in found[0]} for who, found in rounds.items()}
    ratios = {key: medians["ours"][key] / medians["bare"][key] for key in ("s", "mib", "plan_mib")}
    versions = {p: importlib.metadata.version(p) for p in ("tformer-deploy", "tensorrt-rtx", "onnx")}
    table = Table("", "bare", "ours", "ratio", title=f"{name}, layout {layout}, capacity {capacity}", title_justify="left")
    for key, label in (("s", "seconds"), ("mib", "peak memory, MiB"), ("plan_mib", "plans, MiB")):
        table.add_row(label, f"{medians['bare'][key]:.1f}", f"{medians['ours'][key]:.1f}", f"{ratios[key]:.3f}")
    console = Console()
    console.print(table)
    console.print(f"medians of {len(rounds['bare'])} rounds in turn; at most {LIMIT} × is the aim; {versions}", highlight=False)
    line: dict[str, Any] = {
        "model": name, "layout": layout, "capacity": capacity, "rounds": rounds, "medians": medians, "ratios": ratios,
        "versions": versions, "python": platform.python_version(), "machine": platform.processor() or platform.machine(),
    }  # fmt: skip
    print(json.dumps(line, sort_keys=True))


if __name__ == "__main__":
    main()
