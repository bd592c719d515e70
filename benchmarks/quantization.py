"""What each way of quantising costs on one checkpoint: KL, top-1 and perplexity against the unquantised model, and bytes.

    python benchmarks/quantization.py CHECKPOINT --text EVALUATION.txt [--calibration PROMPTS] [--way int4:128:c …]

A way is ``kind:block``, with ``:c`` for weights rounded for the calibration. Each is exported, checked on the runtime by
``tformer-deploy check --text`` and thrown away. The calibration must not be the text that is evaluated. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GROUP = "deployed against the unquantised model"
FIGURES = {
    "KL": "prefill: mean KL",
    "KL, decoding": "decode: mean KL",
    "same top-1": "prefill: same top-1, all positions",
    "perplexity": "prefill: perplexity ratio",
}
WAYS = ("int8:32", "int8:128", "int8:128:c", "int4:32", "int4:128", "int4:128:c", "int4:32:c")


def main() -> None:
    options = arguments()
    rows = []
    for way in options.way or WAYS:
        kind, block, *calibrated = way.split(":")
        if calibrated and options.calibration is None:
            continue
        rows.append(measure(options, way, kind, block, bool(calibrated)))
        print(json.dumps(rows[-1]), file=sys.stderr)
    table = Table("way", *FIGURES, "KL of plain int4, blocks of 32", "MiB", "export s", "verdict", title=options.checkpoint.name)
    for row in rows:
        figures = [f"{row[name]:.4g}" if row[name] is not None else "–" for name in FIGURES]
        plain = "–" if row["plain"] is None else f"{row['plain']:.4g}"
        table.add_row(row["way"], *figures, plain, f"{row['weights_mib']:.1f}", f"{row['export_s']:.0f}", row["verdict"])
    Console(width=160).print(table)
    print(
        json.dumps(
            {
                "checkpoint": options.checkpoint.name,
                "versions": {name: version(name) for name in ("tformer-deploy", "onnxruntime", "torch")},
                "ways": rows,
            }
        )
    )


def measure(options: argparse.Namespace, way: str, kind: str, block: str, calibrated: bool) -> dict[str, Any]:
    """Exports one way and reads its check's report."""
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as scratch:
        bundle, report = Path(scratch) / "bundle", Path(scratch) / "report.json"
        command = ["export", options.checkpoint, "-o", bundle, "--quantize", kind, "--block", block, "--no-check"]
        if calibrated:
            command += ["--calibration", options.calibration]
        started = time.perf_counter()
        run(command, (0,))
        export_s = time.perf_counter() - started
        run(["check", bundle, "--checkpoint", options.checkpoint, "--text", options.text, "--report", report], (0, 1))
        found = json.loads(report.read_text("utf-8"))
        deployed = {c["metric"]: c for c in found["checks"] if c["group"].startswith(GROUP)}
        kl = deployed["prefill: mean KL"]
        figures = {name: deployed[metric]["value"] if metric in deployed else None for name, metric in FIGURES.items()}
        return figures | {
            "way": way,
            "plain": kl["gate"] if kind == "int4" else None,
            "red": [f"{c['group']}: {c['metric']}" for c in found["checks"] if c["verdict"] == "red"],
            "verdict": found["verdict"],
            "weights_mib": (bundle / "weights.bin").stat().st_size / 2**20,
            "export_s": export_s,
        }


def run(command: list[object], expected: tuple[int, ...]) -> None:
    """The command line in a process of its own.

    Raises:
        SystemExit: It ended otherwise.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tformer_deploy.cli", *map(str, command)], capture_output=True, text=True, check=False
    )
    if done.returncode not in expected:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="what is evaluated")
    parser.add_argument("--calibration", type=Path, help="what weights are rounded for")
    parser.add_argument("--way", action="append", help="kind:block or kind:block:c; repeatable")
    return parser.parse_args()


if __name__ == "__main__":
    main()
