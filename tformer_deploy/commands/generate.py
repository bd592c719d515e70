"""``generate``: one prompt, streamed to stdout."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tformer_deploy.backends import open_session, require_consistent
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.finite import require_finite
from tformer_deploy.commands.options import generation_options, sampling_options, stop_strings
from tformer_deploy.errors import InputError
from tformer_deploy.generation import Generator, Request, load_tokenizer

if TYPE_CHECKING:
    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@click.command("generate", short_help="Complete one prompt.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done.")
@generation_options
def command(
    bundle: Path, prompt: str, chat: bool, as_json: bool, max_new_tokens: int, temperature: float, top_k: int, top_p: float,
    min_p: float, repetition_penalty: float, seed: int, prompt_lookup: int, stop: tuple[str, ...], backend: str, provider: ProviderName, engine: str | None, profile: ProfileName, threads: int | None,
) -> None:  # fmt: skip
    """Complete PROMPT and stream the text to stdout."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows less than Unicode
    options = sampling_options(temperature, top_k, top_p, min_p, repetition_penalty)
    require_consistent(backend, profile, provider, engine)
    opened = open_bundle(bundle)
    require_finite(opened)
    tokenizer = load_tokenizer(opened)
    if tokenizer is None:
        raise InputError(f"{bundle} has no tokenizer.", "Use `tformer-deploy run` with input_ids.")
    ids = tokenizer.encode_chat(prompt) if chat else tokenizer.encode(prompt)
    vocab_size = opened.manifest.config.vocab_size
    if bad := [i for i in ids if i >= vocab_size]:
        raise InputError(
            f"The prompt has the token id {tokenizer.name(bad[0])}; the model's go from 0 to {vocab_size - 1}.",
            "Leave that token out: the tokenizer knows more tokens than the model.",
        )
    request = Request(tuple(ids), options, max_new_tokens, stop_strings(stop), seed)
    session = open_session(opened, backend=backend, threads=threads, profile=profile, provider=provider, engine=engine)
    for note in session.backend.notes:
        click.echo(f"Note: {note}", err=True)
    generator = Generator(session, tokenizer, opened.manifest.eos_token_ids, prompt_lookup)
    completion = generator.stream(request, (lambda text: None) if as_json else _show)
    if as_json:
        result = {
            "text": completion.text,
            "output_ids": list(completion.output_ids),
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(ids),
            "completion_tokens": len(completion.output_ids),
        }
        click.echo(json.dumps(result))
    else:
        click.echo()
    if completion.finish_reason == "length" and len(completion.output_ids) < max_new_tokens:
        limit = session.backend.max_length
        click.echo(
            f"Note: ended after {len(completion.output_ids)} new tokens: prompt and completion together have room for {limit}.",
            err=True,
        )


def _show(text: str) -> None:
    """Shows a piece; what would steer a terminal is shown as an escape there."""
    if sys.stdout.isatty():
        text = _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", text)
    click.echo(text, nl=False)
    sys.stdout.flush()
