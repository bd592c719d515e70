"""Flags that `run` and `generate` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tformer_deploy.backends import BACKENDS, PROFILES, PROVIDERS
from tformer_deploy.errors import UsageError
from tformer_deploy.generation import SamplingOptions
from tformer_deploy.generation.sampling import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Callable

PLACE_OPTIONS = [
    click.option("--backend", type=click.Choice(BACKENDS), default="onnxruntime", show_default=True),
    click.option(
        "--provider",
        type=click.Choice(list(PROVIDERS)),
        default="cpu",
        show_default=True,
        help="Where ONNX Runtime runs; one that is not here is an error.",
    ),
    click.option(
        "--engine", default=None, metavar="NAME", help="Of the bundle's engines (tensorrt); the best that fits where absent."
    ),
]

_OPTIONS = [
    click.option("--max-new-tokens", type=click.IntRange(0), default=128, show_default=True, help="Tokens to generate at most."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Keep the likeliest tokens that reach this probability."
    ),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="Keep tokens of this share of the likeliest one's."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, help="Above 1: ids of the row are less likely."
    ),
    click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help="Of the random numbers."),
    click.option(
        "--prompt-lookup",
        type=click.IntRange(0, 64),
        default=0,
        show_default=True,
        help="Guess this many tokens a step from the row itself; the completion is the same.",
    ),
    click.option("--stop", multiple=True, help="Text that ends a completion; repeatable."),
    *PLACE_OPTIONS,
    click.option(
        "--profile",
        type=click.Choice(PROFILES),
        default="auto",
        show_default=True,
        help="The bundle's graphs as they are (portable), or derived for this CPU (cpu); inspect says which.",
    ),
    click.option(
        "--threads", type=click.IntRange(1, 1024), default=None, help="Threads of the runtime; its default where absent."
    ),
]


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags that say what executes: backend, provider, engine."""
    for option in reversed(PLACE_OPTIONS):
        command = option(command)
    return command


def generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_options(temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> SamplingOptions:
    """The flags as options.

    Raises:
        UsageError: One is out of range.
    """
    return SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty)


def stop_strings(stop: tuple[str, ...]) -> tuple[str, ...]:
    """The stop strings.

    Raises:
        UsageError: One is empty.
    """
    if "" in stop:
        raise UsageError("--stop is empty.", "Give the text that ends a completion.")
    return stop
