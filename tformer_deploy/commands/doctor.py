"""``doctor``: what is installed here, and what each command still lacks."""

from __future__ import annotations

import ctypes
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
    "build-engine --flavour rtx": (("onnx", "onnx_ir", "tensorrt_rtx"), "tensorrt-rtx"),
    "build-engine --flavour tensorrt": (("onnx", "onnx_ir", "tensorrt"), "tensorrt"),
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
        _render(found, Console())


def examine() -> dict[str, Any]:
    """Everything that doctor prints, as plain values."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "onnxruntime_providers": _providers(),
        "gpu": _gpu(),
        "commands": {
            name: {"lacks": [m for m in modules if importlib.util.find_spec(m) is None], "extra": extra}
            for name, (modules, extra) in NEEDS.items()
        },
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
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"count": 0, "reason": "no NVIDIA driver (libcuda.so.1 is not there)"}
    if code := driver.cuInit(0):
        return {"count": 0, "reason": f"the NVIDIA driver does not start (cuInit gives {code})"}
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {"count": count.value, "devices": [_device(driver, i) for i in range(count.value)]}


def _device(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, name, value = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, 128, handle)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
        capability.append(str(value.value))
    return {"name": name.value.decode(errors="replace"), "compute_capability": ".".join(capability)}


def _render(found: dict[str, Any], console: Console) -> None:
    console.print(f"Python {found['python']} on {found['platform']}, {found['cpus']} CPUs")
    packages = Table("package", "version", title="Packages", title_justify="left")
    for name, installed in found["packages"].items():
        packages.add_row(name, installed or "[dim]not installed[/dim]")
    console.print(packages)
    console.print(f"ONNX Runtime providers: {', '.join(found['onnxruntime_providers']) or 'none'}")
    gpu = found["gpu"]
    if gpu["count"]:
        for device in gpu["devices"]:
            console.print(f"GPU: {device['name']}, compute capability {device['compute_capability']}")
    else:
        console.print(f"GPU: none; {gpu.get('reason', 'the driver lists no device')}")
    commands = Table("command", "ready", "lacks", title="Commands", title_justify="left")
    for name, state in found["commands"].items():
        lacks = ", ".join(state["lacks"])
        cure = rf"{lacks} → pip install 'tformer-deploy\[{state['extra']}]'" if lacks else ""
        commands.add_row(name, "no" if lacks else "yes", cure)
    console.print(commands)
