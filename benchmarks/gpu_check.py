"""What only a GPU can show, in under 8 minutes: parity, latency and throughput of what this package runs on it.

    python benchmarks/gpu_check.py [--bundle BUNDLE --checkpoint CHECKPOINT] [--dtype fp16] [--budget 450]

Without --bundle the sample checkpoint is exported and compiled in a temporary folder. Each part runs in a process of its own with
a limit; what could not run is listed with the reason, and nothing that did not run is called passed. Prints a table and, as the
last line, one JSON object. Exit code: 0 all that ran passed and the engine was executed, 1 something failed, 4 nothing ran on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from tformer_deploy.commands.doctor import examine

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE = Path(__file__).resolve().parent.parent / "samples" / "shakespeare"
Status = Literal["passed", "failed", "not run"]
# Part → the most seconds that it may take of the budget.
LIMITS = {
    "export": 90,
    "build engine": 150,
    "parity: tensorrt": 120,
    "parity: onnxruntime cuda": 90,
    "speed: tensorrt": 90,
    "speed: onnxruntime cuda": 90,
}
# Compute capabilities of data-centre GPUs, for which TensorRT-RTX does not compile.
FULL_ONLY = ("9.0", "10.0", "10.3")


@dataclass
class Outcome:
    """One part: what came of it, why it did not run or failed, its seconds and figures."""

    name: str
    status: Status
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


class Parts:
    """Runs parts one after the other within a budget of seconds."""

    def __init__(self, budget: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = clock() + budget, clock
        self.outcomes: list[Outcome] = []

    def run(
        self, name: str, arguments: list[str], read: Callable[[str], dict[str, Any]] | None = None, red: bool = False
    ) -> bool:
        """Runs one command of tformer-deploy; whether it passed.

        Args:
            name: Of :data:`LIMITS`.
            arguments: The command's.
            read: Its figures, from its stdout.
            red: Exit code 1 is a verdict, whose figures are read too.
        """
        started = self._clock()
        limit = min(LIMITS[name], self._end - started)
        if limit < 1:
            return self.skip(name, "the time budget was used up")
        code, out, err = command(arguments, limit)
        outcome = Outcome(name, "passed" if code == 0 else "failed", seconds=round(self._clock() - started, 1))
        if code is None:
            outcome.why = f"it was stopped after {limit:.0f} s"
        elif code:
            outcome.why = f"exit code {code}: {last_line(err)}"
        if read is not None and (code == 0 or (red and code == 1)):
            try:
                outcome.figures = read(out)
            except (ValueError, KeyError, IndexError, TypeError) as e:
                outcome.status, outcome.why = "failed", f"its output cannot be read: {type(e).__name__}: {e}"
        self.outcomes.append(outcome)
        return outcome.status == "passed"

    def skip(self, name: str, why: str) -> bool:
        """Notes that a part did not run."""
        self.outcomes.append(Outcome(name, "not run", why))
        return False


def command(arguments: list[str], limit: float) -> tuple[int | None, str, str]:
    """Exit code (None: stopped at the limit), stdout and stderr of one command; its children end with it."""
    words = [sys.executable, "-m", "tformer_deploy.cli", *arguments]
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return None, "", ""
    return child.returncode, out, err


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def read_parity(out: str) -> dict[str, Any]:
    report = json.loads(out)
    worst = {f"{c['group']}: {c['metric']}": c["value"] for c in report["checks"] if c["verdict"] == "red"}
    return {
        "verdict": report["verdict"],
        "checks": len(report["checks"]),
        "dtype": report["dtype"],
        "red": worst,
        "notes": report["notes"],
    }


def read_speed(out: str) -> dict[str, Any]:
    figures = json.loads(out.strip().splitlines()[-1])
    kept = ("batch", "prompt_length", "ttft_ms", "tpot_ms", "itl_p99_ms", "prefill_tokens_per_s", "decode_tokens_per_s")
    return {
        "points": [{k: p[k] for k in kept} for p in figures["points"]],
        "versions": figures["versions"],
        "notes": figures["notes"],
    }


def flavour_for(capability: str, found: dict[str, Any]) -> str | None:
    """The installed flavour that this GPU can run; None where there is none."""
    usable = [f["flavour"] for f in found["tensorrt"] if f["fault"] is None]
    wanted = ["tensorrt"] if capability in FULL_ONLY else ["rtx", "tensorrt"]
    return next((f for f in wanted if f in usable), None)


def run_parts(parts: Parts, found: dict[str, Any], options: argparse.Namespace, scratch: Path) -> None:
    """Everything that this machine can run."""
    bundle, checkpoint = options.bundle, options.checkpoint
    if bundle is None:
        bundle, checkpoint = scratch / "sample.bundle", checkpoint or SAMPLE
        if not parts.run("export", ["export", str(checkpoint), "-o", str(bundle), "--dtype", options.dtype, "--no-check"]):
            for name in list(LIMITS)[1:]:
                parts.skip(name, "there is no bundle")
            return
    parity = ["check", str(bundle), "--json", *(["--checkpoint", str(checkpoint)] if checkpoint else [])]
    speed = ["bench", str(bundle), "--json", "--batch", "1", "--batch", "8", "--prompt-length", str(options.prompt_length)]
    speed += ["--new-tokens", str(options.new_tokens), "--repeats", "3"]
    if built_engine(parts, found, bundle):
        if checkpoint:
            parts.run("parity: tensorrt", [*parity, "--backend", "tensorrt"], read_parity, red=True)
        else:
            parts.skip("parity: tensorrt", "no --checkpoint was given to compare with")
        parts.run("speed: tensorrt", [*speed, "--backend", "tensorrt"], read_speed)
    else:
        for name in ("parity: tensorrt", "speed: tensorrt"):
            parts.skip(name, "there is no engine for this GPU")
    if "CUDAExecutionProvider" not in found["onnxruntime_providers"]:
        for name in ("parity: onnxruntime cuda", "speed: onnxruntime cuda"):
            parts.skip(name, "this onnxruntime has no CUDAExecutionProvider")
        return
    if checkpoint:
        parts.run("parity: onnxruntime cuda", [*parity, "--provider", "cuda"], read_parity, red=True)
    else:
        parts.skip("parity: onnxruntime cuda", "no --checkpoint was given to compare with")
    parts.run("speed: onnxruntime cuda", [*speed, "--provider", "cuda"], read_speed)


def built_engine(parts: Parts, found: dict[str, Any], bundle: Path) -> bool:
    """Whether there is an engine to run: one that the bundle brought, or one built now."""
    capability = found["gpu"]["devices"][0]["compute_capability"]
    flavour = flavour_for(capability, found)
    if flavour is None:
        return parts.skip("build engine", f"no flavour of TensorRT that runs on compute capability {capability} is installed")
    if (bundle / "engines").is_dir():
        parts.skip("build engine", "the bundle brought its own")
        return True
    target = ["--target", capability] if flavour == "rtx" else []
    return parts.run(
        "build engine", ["build-engine", str(bundle), "--flavour", flavour, "--max-batch", "8", *target, "--json"], read_build
    )


def read_build(out: str) -> dict[str, Any]:
    record = json.loads(out.strip().splitlines()[-1])
    return {k: record[k] for k in ("flavour", "version", "dtype", "capacity", "build_s")}


def render(outcomes: list[Outcome], console: Console) -> None:
    table = Table("part", "outcome", "s", "figures or reason", title="GPU check", title_justify="left")
    for o in outcomes:
        lines = [o.why] if o.why else []
        for p in o.figures.get("points", []):
            lines.append(
                f"B={p['batch']}: TTFT {p['ttft_ms']:.2f} ms, TPOT {p['tpot_ms']:.3f} ms, {p['decode_tokens_per_s']:,.0f} tokens/s decoded, "
                f"{p['prefill_tokens_per_s']:,.0f} prefilled"
            )
        if "verdict" in o.figures:
            lines.append(
                f"{o.figures['verdict']}, {o.figures['checks']} checks, {o.figures['dtype']} gates; red: {len(o.figures['red'])}"
            )
        if "build_s" in o.figures:
            lines.append(f"{o.figures['flavour']} {o.figures['version']}, {o.figures['dtype']}, capacity {o.figures['capacity']}")
        table.add_row(o.name, o.status, f"{o.seconds:.1f}" if o.seconds else "", "\n".join(lines))
    console.print(table, highlight=False)


def summary(outcomes: list[Outcome], found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The JSON line. ``executed`` names the parts that a GPU ran."""
    on_gpu = [o.name for o in outcomes if o.name.startswith(("parity", "speed")) and o.status == "passed"]
    return {
        "gpu": found["gpu"],
        "tensorrt": found["tensorrt"],
        "onnxruntime_providers": found["onnxruntime_providers"],
        "executed": on_gpu,
        "engine_executed": any("tensorrt" in name for name in on_gpu),
        "failed": [o.name for o in outcomes if o.status == "failed"],
        "not_run": {o.name: o.why for o in outcomes if o.status == "not run"},
        "parts": [dataclasses.asdict(o) for o in outcomes],
        "seconds": round(seconds, 1),
    }


def exit_code(outcomes: list[Outcome], line: dict[str, Any]) -> int:
    if line["failed"]:
        return 1
    if not line["executed"]:
        return 4
    return 0 if line["engine_executed"] else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Parity, latency and throughput on the GPU that is here.")
    parser.add_argument("--bundle", type=Path, default=None, help="the sample is exported where absent")
    parser.add_argument("--checkpoint", type=Path, default=None, help="what the bundle was made from")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16", help="of the sample's bundle")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args(argv)
    started = time.monotonic()
    found = examine()
    parts = Parts(options.budget)
    if found["gpu"]["count"]:
        with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as scratch:
            run_parts(parts, found, options, Path(scratch))
    else:
        for name in LIMITS:
            parts.skip(name, "there is no NVIDIA GPU")
    render(parts.outcomes, Console(width=max(Console().width, 140)))
    line = summary(parts.outcomes, found, time.monotonic() - started)
    if not found["gpu"]["count"]:
        print(f"Nothing ran: no NVIDIA GPU is here ({found['gpu']['reason']}).", file=sys.stderr)
    elif not line["engine_executed"]:
        print("No engine was executed: it is built at most, and its fusion proven.", file=sys.stderr)
    print(json.dumps(line, sort_keys=True))
    return exit_code(parts.outcomes, line)


if __name__ == "__main__":
    sys.exit(main())
