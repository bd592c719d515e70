"""``doctor``: what is installed here, and what each command still lacks."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tformer_deploy.backends import cuda
from tformer_deploy.backends.tensorrt.package import installed_flavours, load_packages
from tformer_deploy.commands.console import wide_console
from tformer_deploy.errors import TformerError

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Distribution → the module it brings. Several distributions may bring one module (onnxruntime).
PACKAGES = {
    "tformer-deploy": "tformer_deploy",
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "onnx": "onnx",
    "onnx-ir": "onnx_ir",
    "onnxscript": "onnxscript",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "tensorrt-rtx": "tensorrt_rtx",
    "tensorrt": "tensorrt",
}

# Command → modules it needs, and the extra that brings them.
NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "export": (("torch", "onnx", "onnx_ir", "onnxscript", "safetensors", "onnxruntime"), "export"),
    "export (GGUF)": (("torch", "onnx", "onnx_ir", "onnxscript", "gguf", "onnxruntime"), "export"),
    "check": (("torch", "safetensors", "onnxruntime"), "export"),
    "run, generate, bench": (("onnxruntime", "tokenizers"), "cpu"),
    "build-engine --flavour rtx": (("onnx", "tensorrt_rtx"), "tensorrt-rtx"),
    "build-engine --flavour tensorrt": (("onnx", "tensorrt"), "tensorrt"),
    "build-engine in another dtype than the bundle's, too": (("torch", "onnx_ir", "onnxscript", "onnxruntime"), "export"),
    "seal, inspect, doctor": ((), ""),
}


@click.command("doctor", short_help="Show what is installed and what each command lacks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Show what is installed, the providers and GPUs found, and what each command lacks.

    The exit code is 0 whatever is missing: nothing here is an error by itself.
    """
    found = examine()
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _render(found, wide_console())


def examine() -> dict[str, Any]:
    """Everything that doctor prints, as plain values."""
    gpu, flavours, providers = _gpu(), _tensorrt(), _providers()
    commands = {
        name: {"lacks": [m for m in modules if importlib.util.find_spec(m) is None], "extra": extra}
        for name, (modules, extra) in NEEDS.items()
    }
    no_gpu = [] if gpu["count"] else ["an NVIDIA GPU"]
    no_package = [] if any(f["fault"] is None for f in flavours) else ["tensorrt_rtx or tensorrt"]
    commands["run, generate, bench, check --backend tensorrt"] = {"lacks": no_package + no_gpu, "extra": "tensorrt-rtx"}
    no_provider = [] if "CUDAExecutionProvider" in providers else ["CUDAExecutionProvider"]
    commands["run, generate, bench, check --provider cuda"] = {"lacks": no_provider + no_gpu, "extra": "gpu"}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "onnxruntime_providers": providers,
        "tensorrt": flavours,
        "gpu": gpu,
        "commands": commands,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _providers() -> list[str]:
    if importlib.util.find_spec("onnxruntime") is None:
        return []
    import onnxruntime

    return list(onnxruntime.get_available_providers())


def _gpu() -> dict[str, Any]:
    """Asks NVIDIA's driver library itself, so that no CUDA package is needed."""
    found, _ = cuda.probe()
    return {
        "count": len(found.gpus),
        "devices": [dataclasses.asdict(gpu) for gpu in found.gpus],
        "driver_cuda": found.driver_cuda,
        "reason": found.reason,
    }


def _tensorrt() -> list[dict[str, str | None]]:
    """Both flavours, imported: a package whose libraries do not load is not there."""
    found: list[dict[str, str | None]] = []
    for flavour in installed_flavours():
        try:
            found.append({"flavour": flavour, "version": load_packages({flavour})[flavour].version, "fault": None})
        except TformerError as e:
            found.append({"flavour": flavour, "version": None, "fault": e.message})
    return found


def _render(found: dict[str, Any], console: Console) -> None:
    console.print(f"Python {found['python']} on {found['platform']}, {found['cpus']} CPUs")
    packages = Table("package", "version", title="Packages", title_justify="left")
    for name, installed in found["packages"].items():
        packages.add_row(name, installed or "[dim]not installed[/dim]")
    console.print(packages)
    providers, gpu = found["onnxruntime_providers"], found["gpu"]
    on_gpu = [p for p in providers if p in ("CUDAExecutionProvider", "TensorrtExecutionProvider")]
    console.print(f"ONNX Runtime providers: {', '.join(providers) or 'none'}; for a GPU: {', '.join(on_gpu) or 'none'}")
    for flavour in found["tensorrt"]:
        state = flavour["version"] or f"cannot be used: {flavour['fault']}"
        console.print(f"TensorRT, flavour {flavour['flavour']}: {state}", highlight=False, markup=False)
    if not found["tensorrt"]:
        console.print("TensorRT: neither flavour is installed")
    if gpu["driver_cuda"]:
        console.print(f"NVIDIA driver: serves CUDA {gpu['driver_cuda']} and older", highlight=False)
    for device in gpu["devices"]:
        console.print(
            f"GPU {device['index']}: {device['name']}, compute capability {device['compute_capability']}, {device['total_mib']:,} MiB",
            highlight=False,
        )
    if not gpu["count"]:
        console.print(f"GPU: none; {gpu['reason']}", highlight=False, markup=False)
    commands = Table("command", "ready", "lacks", title="Commands", title_justify="left")
    for name, state in found["commands"].items():
        lacks = ", ".join(state["lacks"])
        cure = rf"{lacks} → pip install 'tformer-deploy\[{state['extra']}]'" if lacks and lacks != "an NVIDIA GPU" else lacks
        commands.add_row(name, "no" if lacks else "yes", cure)
    console.print(commands)
