"""``inspect``: what a bundle holds: graphs, caches, weights, engines and what was proven about them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tformer_deploy.backends.cpu.plan import plan_for
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engines import list_engines
from tformer_deploy.bundle.fusable import DEFAULT_CAPACITY, build_command, no_engine, unfusable
from tformer_deploy.bundle.signature import PHASES, TensorSignature, cache_bytes_per_token, graph_inputs, graph_outputs
from tformer_deploy.commands.console import wide_console
from tformer_deploy.config import DTYPES
from tformer_deploy.errors import printable
from tformer_deploy.parameters import parameter_shapes

if TYPE_CHECKING:
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import DType


@click.command("inspect", short_help="Show what a bundle holds.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, as_json: bool) -> None:
    """Show the graphs, the caches and their bytes per row, the weights, the engines and their fusion reports.

    The bundle is verified first; no graph is loaded and no GPU is needed.
    """
    found = describe(open_bundle(bundle))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        _render(found, wide_console())


def describe(bundle: Bundle) -> dict[str, Any]:
    """Everything that inspect prints, as plain values."""
    manifest = bundle.manifest
    stored = manifest.quantization
    cpu = plan_for(manifest.config, manifest.dtype)
    per_token = cache_bytes_per_token(manifest.config, manifest.dtype)
    return {
        "path": str(bundle.path),
        "core_sha256": bundle.core_sha256,
        "dtype": manifest.dtype,
        "quantization": None if stored is None else {**dataclasses.asdict(stored), "sentence": stored.sentence},
        "max_length": manifest.max_length,
        "eos_token_ids": list(manifest.eos_token_ids),
        "source": dataclasses.asdict(manifest.source),
        "versions": manifest.versions,
        "config": manifest.config.to_dict(),
        "graphs": {
            phase: {
                "file": f"{phase}.onnx",
                "inputs": [_signature(s) for s in graph_inputs(manifest.config, manifest.dtype, phase)],
                "outputs": [_signature(s) for s in graph_outputs(manifest.config, manifest.dtype)],
            }
            for phase in PHASES
        },
        "cache": {
            "bytes_per_token": per_token,
            "bytes_per_row_at_max_length": per_token * manifest.max_length,
        },
        "weights": {
            "tensors": len(manifest.tensors),
            "parameters": sum(_count(shape) for shape in parameter_shapes(manifest.config).values()),
            "bytes": sum(t.size for t in manifest.tensors.values()),
        },
        "files": {name: dataclasses.asdict(record) for name, record in sorted(manifest.files.items())},
        "cpu": {"profile": "cpu" if cpu.applies else "portable", "reasons": list(cpu.reasons)},
        "tensorrt": {dtype: _engine_faults(bundle, dtype) for dtype in DTYPES},
        "build_engine": f"`{build_command(bundle)}` makes one",
        "engines": [dataclasses.asdict(engine) for engine in list_engines(bundle)],
    }


def _engine_faults(bundle: Bundle, dtype: DType) -> list[str]:
    """Why TensorRT makes no engine of a bundle in a dtype."""
    manifest = bundle.manifest
    stored = no_engine(manifest.quantization, cast=dtype != manifest.dtype)
    if stored is not None:
        return [stored[0]]
    return [fault for fault, _ in unfusable(manifest.config, dtype, min(manifest.max_length, DEFAULT_CAPACITY))]


def _signature(signature: TensorSignature) -> dict[str, Any]:
    return {"name": signature.name, "dtype": signature.dtype, "dims": list(signature.dims)}


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for dim in shape:
        product *= dim
    return product


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _render(found: dict[str, Any], console: Console) -> None:
    config, source = found["config"], found["source"]
    console.print(f"[bold]{escape(printable(found['path']))}[/bold]  core {found['core_sha256'][:12]}", highlight=False)
    origin = f"{printable(source['name'])} ({source['family']}, {source['format']})"
    console.print(f"from {origin}, {found['dtype']}, max_length {found['max_length']}", markup=False)
    console.print(
        f"{config['n_layers']} layers, width {config['d_model']}, {config['n_heads']} heads over {config['n_kv_heads']} kv heads of "
        f"{config['head_dim']}, vocabulary {config['vocab_size']}, {config['norm']}, {config['positions']} positions, "
        f"{'tied' if config['tied'] else 'untied'} head"
    )
    weights, cache = found["weights"], found["cache"]
    console.print(f"weights: {weights['parameters']:,} parameters in {weights['tensors']} tensors, {_mib(weights['bytes'])}")
    if found["quantization"] is not None:
        console.print(found["quantization"]["sentence"], highlight=False, markup=False)
    console.print(
        f"caches: {cache['bytes_per_token']:,} bytes a token, {_mib(cache['bytes_per_row_at_max_length'])} a row at max_length"
    )
    graphs = Table(
        "graph", "input or output", "dtype", "dims", title="Graphs (opset 24, caches updated in place)", title_justify="left"
    )
    for phase, graph in found["graphs"].items():
        for kind in ("inputs", "outputs"):
            for signature in _without_later_layers(graph[kind]):
                dims = ", ".join(map(str, signature["dims"]))
                graphs.add_row(phase, ("→ " if kind == "outputs" else "") + signature["name"], signature["dtype"], rf"\[{dims}]")
        graphs.add_section()
    console.print(graphs)
    console.print(
        f"ONNX Runtime on this CPU: profile {found['cpu']['profile']}. {' '.join(found['cpu']['reasons'])}", highlight=False
    )
    for dtype, faults in found["tensorrt"].items():
        verdict = "; ".join(faults) if faults else "all attention can be fused"
        console.print(f"TensorRT {dtype}: {verdict}", highlight=False, markup=False)
    if not found["engines"]:
        console.print(
            f"engines: none ({found['build_engine']})" if found["build_engine"] else "engines: none",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for engine in found["engines"]:
        _render_engine(engine, console)


def _without_later_layers(signatures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every layer has the same caches: one stands for all."""
    return [
        s | {"name": s["name"].replace(".0.", ".{layer}.")}
        for s in signatures
        if "." not in s["name"] or s["name"].split(".")[1] == "0"
    ]


def _render_engine(engine: dict[str, Any], console: Console) -> None:
    record = engine["record"]
    if record is None or engine["fault"] is not None:
        console.print(f"engine {engine['folder']}: {engine['summary']}", highlight=False, markup=False)
        return
    console.print(f"engine {engine['folder']}: {engine['summary']}", highlight=False, markup=False)
    table = Table(
        "plan", "profile", "rows", "new tokens a row", "logits a row", "fused attention", "not fused", "matrices unpacked",
        title_justify="left",
    )  # fmt: skip
    for plan in record["plans"]:
        for p in plan["profiles"]:
            fused = ", ".join(f"{n} × {kernel}" for kernel, n in p["plan_kernels"].items()) or "none"
            ranges = ["–".join(map(str, dict.fromkeys((low, high)))) for low, _, high in (p["batch"], p["sequence"], p["logits"])]
            table.add_row(plan["file"], p["name"], *ranges, fused, ", ".join(p["decomposed"]) or "none", str(len(p["unpacked"])))
    console.print(table)
    for note in record["graph"]["notes"] if record["graph"] is not None else ():
        console.print(f"  note: {printable(note)}", highlight=False, markup=False)
