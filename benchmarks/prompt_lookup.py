"""Prompt lookup by category of prompts: guesses that were right, steps saved, time saved, and that the completions are the same.

    python benchmarks/prompt_lookup.py BUNDLE PROMPTS.jsonl [--per-category 5] [--guesses 4] [--new-tokens 96] [--threads 2]

PROMPTS has ``category`` and ``turns`` (the first counts) or ``prompt`` a line, as Spec-Bench has. Each prompt is completed greedily
with and without guesses in turn; times are those of the whole completion, prompt included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tformer_deploy import open_bundle
from tformer_deploy.generation import Generator, Request, SamplingOptions, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Category:
    """What was found for prompts of one kind."""

    ratios: list[float] = field(default_factory=list)  # time without guesses over time with them, a prompt each
    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    right: int = 0
    different: int = 0  # completions that are not the same token for token


def main() -> None:
    options = arguments()
    bundle = open_bundle(options.bundle)
    session, tokenizer = bundle.session(threads=options.threads), load_tokenizer(bundle)
    assert tokenizer is not None, f"{options.bundle} has no tokenizer"
    plain = Generator(session, tokenizer, bundle.manifest.eos_token_ids)
    guessing = Generator(session, tokenizer, bundle.manifest.eos_token_ids, options.guesses)
    room = bundle.manifest.max_length - options.new_tokens
    found: dict[str, Category] = {}
    for name, text in prompts(options.prompts, options.per_category):
        ids = tuple(tokenizer.encode(text))[:room]
        request = Request(ids, SamplingOptions(temperature=0.0), max_new_tokens=options.new_tokens)
        if not found:
            timed(plain, request), timed(guessing, request)  # warms up
            guessing.guessed = guessing.right = 0
        category = found.setdefault(name, Category())
        before = (guessing.guessed, guessing.right)
        slow, wanted, _ = timed(plain, request)
        fast, tokens, steps = timed(guessing, request)
        category.ratios.append(slow / fast)
        category.tokens += len(tokens)
        category.steps += steps
        category.guessed += guessing.guessed - before[0]
        category.right += guessing.right - before[1]
        category.different += wanted != tokens
    table = Table(
        "category", "prompts", "tokens", "guesses right", "tokens a step", "time without / with", "different completions"
    )
    for name, c in found.items():
        share = f"{c.right / c.guessed:.0%} of {c.guessed}" if c.guessed else "none made"
        ratio = statistics.median(c.ratios)
        table.add_row(
            name, str(len(c.ratios)), str(c.tokens), share, f"{c.tokens / max(c.steps, 1):.2f}", f"{ratio:.2f}", str(c.different)
        )
    Console(width=120).print(table)
    result = {name: vars(c) | {"ratio": statistics.median(c.ratios)} for name, c in found.items()}
    stamps = {name: version(name) for name in ("tformer-deploy", "onnxruntime")}
    print(json.dumps({"bundle": options.bundle.name, "guesses": options.guesses, "versions": stamps, "categories": result}))


def timed(generator: Generator, request: Request) -> tuple[float, tuple[int, ...], int]:
    """Seconds, the completion's ids, and calls of the decode graph."""
    session = generator.session
    calls, decode = 0, session.backend.decode

    def counted(*inputs: object) -> object:
        nonlocal calls
        calls += 1
        return decode(*inputs)  # type: ignore[arg-type]

    session.backend.decode = counted  # type: ignore[method-assign,assignment]
    try:
        started = time.perf_counter()
        (completion,) = generator.generate([request])
        seconds = time.perf_counter() - started
    finally:
        session.backend.decode = decode  # type: ignore[method-assign]
    return seconds, tuple(completion.output_ids), calls


def prompts(path: Path, count: int) -> Iterator[tuple[str, str]]:
    """Category and text of the first ``count`` prompts of each category."""
    taken: dict[str, int] = {}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        name = str(row.get("category", "all"))
        taken[name] = taken.get(name, 0) + 1
        if taken[name] <= count:
            yield name, row["turns"][0] if "turns" in row else row["prompt"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--per-category", type=int, default=5)
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
