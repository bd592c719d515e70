"""Compares tformer-deploy with its neighbours on the same weights and prompts, in one command. See README.md.

python benchmarks/peers/run.py --checkpoint 0.5b --checkpoint gpt2 --out DIR [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoints import label, prepare, prompts
from environments import UnmetError, model_of, python_of
from tables import Metric, agreement, print_tables, value
from workers import Entry, Worker

PEERS = ("transformers", "genai", "ctranslate2", "llamacpp", "openvino")
PRECISIONS = ("fp32", "int8", "int4")
_PAUSE_S = 0.1  # between two turns: threads that still spin for the last one go to sleep
_COLD = 32


def main() -> None:
    options = arguments()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="minutes"), "machine": machine(), "checkpoints": {}}
    result |= {"threads": options.threads, "rounds": options.rounds, "new_tokens": options.new_tokens}
    for wanted in options.checkpoint:
        name = label(wanted)
        say(f"{name}: weights")
        checkpoint = prepare(wanted, out / "checkpoints")
        groups = result["checkpoints"][name] = {}
        reference = Reference()
        for precision in options.precision:
            groups[precision] = compare(name, checkpoint, precision, options, out, reference)
            (out / "results.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({"results": str(out / "results.json"), "versions": stamped(result)}))


@dataclass
class Reference:
    """Greedy tokens of the first precision that ran, by case: what agreement is measured with."""

    name: str = ""
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)


def compare(
    name: str, checkpoint: Path, precision: str, options: argparse.Namespace, out: Path, reference: Reference
) -> dict[str, Any]:
    """Sets up all entries of one precision, runs them in turn, and prints their table."""
    entries, unmet = set_up(name, checkpoint, precision, options, out)
    group: dict[str, Any] = {"entries": {}, "unmet": unmet, "versions": {}, "agreement": {}, "answers": {}}
    ours = [entry.name for entry in entries if entry.peer == "ours"]
    group["ours"] = ours[0] if ours else f"ours {precision}"
    cases, metrics = columns(options)
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    with contextlib.ExitStack() as stack:
        workers = []
        for entry in entries:
            say(f"{name} {precision}: loading {entry.name}")
            try:
                worker = stack.enter_context(Worker(entry, options.threads, out))
            except UnmetError as e:
                unmet[entry.name] = str(e)
                continue
            workers.append(worker)
            group["versions"][entry.name] = worker.ready["versions"]
            group["answers"][entry.name] = {case: [] for case in cases}
        rounds(workers, cases, vocabulary, options, group, f"{name} {precision}")
    cold_starts([w.entry for w in workers if w.entry.name not in unmet], vocabulary, options, out, group)
    fold(group, cases, metrics, precision, reference)
    done = max((len(runs) for answers in group["answers"].values() for runs in answers.values()), default=0)
    print_tables(group, metrics, f"{name}, {precision}, {options.threads} threads, medians of {done} rounds (ours / theirs)")
    del group["answers"]
    return group


def set_up(
    name: str, checkpoint: Path, precision: str, options: argparse.Namespace, out: Path
) -> tuple[list[Entry], dict[str, str]]:
    """Installed and converted entries, ours first, and why others are missing."""
    entries, unmet = bundles(name, precision, options), {}
    for peer in (*(["ours"] if options.ours else []), *options.peer):
        module = importlib.import_module(f"{peer}_peer")
        if precision not in module.PRECISIONS:
            continue
        say(f"{name} {precision}: {peer}")
        try:
            python = python_of(peer, module, out)
            folder = model_of(peer, module, python, checkpoint, precision, out)
        except UnmetError as e:
            unmet[peer] = str(e)
            continue
        entries.append(Entry("ours " + precision if peer == "ours" else peer, peer, precision, python, folder))
    return entries, unmet


def bundles(name: str, precision: str, options: argparse.Namespace) -> list[Entry]:
    """Those of --bundle that belong to a checkpoint and a precision; the first is what others are compared with."""
    entries = []
    for given in options.bundle:
        where, _, path = given.partition("=")
        of, _, kind = where.rpartition(":")
        if kind.startswith(precision) and of in ("", name):
            entries.append(Entry(f"ours {kind}", "ours", precision, Path(sys.executable), Path(path).resolve()))
    return entries


def columns(options: argparse.Namespace) -> tuple[dict[str, tuple[int, int, int]], list[Metric]]:
    """Cases as name → (batch, prompt, new tokens), and the metrics read from them."""
    cases, metrics = {}, []
    for text in options.decode:
        batch, length = map(int, text.split("x"))
        cases[text] = (batch, length, options.new_tokens + 1)
        metrics.append(Metric(f"decode {text}", "tok/s", text, True))
    for length in options.prefill:
        text = next((case for case, (batch, n, _) in cases.items() if (batch, n) == (1, length)), f"prefill {length}")
        cases.setdefault(text, (1, length, 1))
        metrics.append(Metric(f"prefill {length}", "tok/s", text, True))
    last = list(cases)[-1]
    return cases, [*metrics, Metric("memory (PSS)", "MiB", last, False), Metric("cold start", "s", "cold", False)]


def rounds(
    workers: list[Worker], cases: dict[str, tuple[int, int, int]], vocabulary: int, options: argparse.Namespace, group: dict[str, Any],
    title: str,
) -> None:  # fmt: skip
    """Every case by every worker in turn (A B C, A B C, …); the first round warms up. A worker that fails is out."""
    started = time.monotonic()
    for turn in range(options.rounds + 1):
        if turn > 1 and options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            say(f"{title}: {turn - 1} of {options.rounds} rounds, the time is up")
            break
        say(f"{title}: round {turn} of {options.rounds}" + (" (warm-up)" if not turn else ""))
        for case, (batch, length, new) in cases.items():
            rows = prompts(vocabulary, batch, length)
            for worker in workers:
                name = worker.entry.name
                if name in group["unmet"]:
                    continue
                time.sleep(_PAUSE_S)
                try:
                    answer = worker.run(rows, new)
                except UnmetError as e:
                    group["unmet"][name] = f"{case}: {e}"
                    continue
                if turn:
                    group["answers"][name][case].append(answer)


def cold_starts(entries: list[Entry], vocabulary: int, options: argparse.Namespace, out: Path, group: dict[str, Any]) -> None:
    """Seconds from starting a process to the first token of a short prompt; files are in the page cache by now."""
    rows = prompts(vocabulary, 1, _COLD)
    for _ in range(options.cold):
        for entry in entries:
            answers = group["answers"][entry.name].setdefault("cold", [])
            time.sleep(_PAUSE_S)
            try:
                with Worker(entry, options.threads, out) as worker:
                    answer = worker.run(rows, 1)
                    answers.append(answer | {"cold_s": time.perf_counter() - worker.started})
            except UnmetError as e:
                group["unmet"][entry.name] = f"cold start: {e}"


def fold(
    group: dict[str, Any], cases: dict[str, tuple[int, int, int]], metrics: list[Metric], precision: str, reference: Reference
) -> None:
    """Answers → values by metric, medians, and agreement of the greedy tokens with the reference, which the first group sets."""
    if not reference.tokens:
        first = next(
            (name for name in ("transformers", group["ours"]) if all(group["answers"].get(name, {}).get(c) for c in cases)), ""
        )
        reference.name = f"{first} {precision}" if first else ""
        reference.tokens = {case: group["answers"][first][case][0]["tokens"] for case in cases} if first else {}
    for name, answers in group["answers"].items():
        values = group["entries"][name] = {}
        for metric in metrics:
            batch, length, _ = cases.get(metric.case, (1, _COLD, 1))
            found = [value(metric, answer, batch, length) for answer in answers.get(metric.case, [])]
            values[metric.name] = [v for v in found if v is not None]
        shares = [agreement(answers[c][0]["tokens"], tokens) for c, tokens in reference.tokens.items() if answers.get(c)]
        group["agreement"][name] = statistics.mean(shares) if shares else None
    group["agreement_with"] = reference.name
    group["medians"] = {
        name: {metric: statistics.median(v) for metric, v in values.items() if v} for name, values in group["entries"].items()
    }


def machine() -> dict[str, Any]:
    """What it ran on, without names."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    with contextlib.suppress(OSError):
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
        names = {key.strip(): text.strip() for key, text in lines.items()}
        flags = set(names.get("flags", "").split())
        wide = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags]
        facts |= {"cpu": names.get("model name", ""), "cache": names.get("cache size", ""), "features": wide}
    with contextlib.suppress(OSError):
        facts["load_at_start"] = os.getloadavg()[0]
    return facts


def stamped(result: dict[str, Any]) -> dict[str, str]:
    """All versions that ran."""
    found: dict[str, str] = {}
    for groups in result["checkpoints"].values():
        for group in groups.values():
            for versions in group["versions"].values():
                found |= versions
    return dict(sorted(found.items()))


def say(words: str) -> None:
    print(f"[{datetime.now(UTC):%H:%M:%S}] {words}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", action="append", required=True, help="0.5b, gpt2, smollm2, a llama GGUF file or a folder; repeatable")
    add("--bundle", action="append", default=[], metavar="[CHECKPOINT:]PRECISION…=PATH", help="one of our bundles; repeatable")
    add("--out", type=Path, required=True, help="folder of environments, models and results; reused")
    add("--peer", action="append", choices=PEERS, help="all where absent; repeatable")
    add("--precision", action="append", choices=PRECISIONS, help="all where absent; repeatable")
    add("--no-ours", dest="ours", action="store_false", help="export no fp32 bundle of our own; --bundle alone")
    add("--decode", action="append", metavar="BATCHxPROMPT", help="1x32, 1x256 and 8x32 where absent; repeatable")
    add("--prefill", action="append", type=int, metavar="PROMPT", help="256 and 1024 where absent; repeatable")
    add("--new-tokens", type=int, help="decoded tokens that are timed")
    add("--rounds", type=int, help="measured rounds after a warm-up")
    add("--cold", type=int, help="cold starts of each")
    add("--minutes", type=float, help="begin no further round after so many minutes in a precision; one is measured all the same")
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="2 rounds of 8 tokens and 1 cold start")
    options = parser.parse_args()
    options.peer, options.precision = options.peer or PEERS, options.precision or PRECISIONS
    options.decode, options.prefill = options.decode or ["1x32", "1x256", "8x32"], options.prefill or [256, 1024]
    defaults = (8, 2, 1) if options.quick else (32, 5, 3)
    for name, default in zip(("new_tokens", "rounds", "cold"), defaults, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


if __name__ == "__main__":
    main()
