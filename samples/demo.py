"""``make demo``: the main job on the sample checkpoint, command by command, ending in a table.

Every step is a command that a user would type; this script only runs them and shows what came out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

SAMPLES = Path(__file__).resolve().parent
CHECKPOINT = SAMPLES / "shakespeare"
PROMPTS = SAMPLES / "prompts.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for the bundle and the completions")
    arguments = parser.parse_args()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    bundle, completions = output / "shakespeare.bundle", output / "completions.jsonl"
    # --no-check: the next step is the full check, so that nothing is checked twice.
    steps = {
        "export": ["export", CHECKPOINT, "-o", bundle, "--no-check", "--force"],
        "check": ["check", bundle, "--checkpoint", CHECKPOINT],
        "build-engine": ["build-engine", bundle, "--dtype", "fp16"],
        "run": ["run", bundle, PROMPTS, "-o", completions, "--max-new-tokens", "48", "--force"],
        "inspect": ["inspect", bundle],
    }
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 140))
    seconds = {}
    for name, words in steps.items():
        command = ["tformer-deploy", *map(str, words)]
        console.rule(f"[bold]{name}")
        console.print("$", " ".join(command), highlight=False, markup=False)
        started = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        seconds[name] = time.perf_counter() - started
        if code:
            console.print(f"`{name}` ended with exit code {code}; the demo stops here.")
            return code
    console.rule("[bold]what came out")
    show(console, completions, seconds)
    return 0


def show(console: Console, completions: Path, seconds: dict[str, float]) -> None:
    """The first completions, and what each step took."""
    prompts = {row["id"]: row["prompt"] for row in map(json.loads, PROMPTS.read_text("utf-8").splitlines())}
    rows = [json.loads(line) for line in completions.read_text("utf-8").splitlines()]
    table = Table("id", "prompt", "completion", "tokens in", "out", "finish", title=f"{len(rows)} completions, the first 8 shown")
    for row in rows[:8]:
        text = [_short(prompts[row["id"]]), _short(row["text"])]
        table.add_row(str(row["id"]), *text, str(row["prompt_tokens"]), str(row["completion_tokens"]), row["finish_reason"])
    console.print(table)
    times = Table(*seconds, title="seconds")
    times.add_row(*(f"{s:.1f}" for s in seconds.values()))
    console.print(times)


def _short(text: str, width: int = 40) -> str:
    flat = " ".join(text.split()).replace("[", r"\[")
    return flat if len(flat) <= width else flat[: width - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
