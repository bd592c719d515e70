"""``run``: a file of prompts → a file of completions, in length buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tformer_deploy.backends import open_session, require_consistent
from tformer_deploy.batch.job import Summary, run_job
from tformer_deploy.batch.planner import DEFAULT_EDGES
from tformer_deploy.batch.rows import FIELDS, Defaults, read_rows, scan
from tformer_deploy.batch.sink import OrderedFile
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.finite import require_finite
from tformer_deploy.commands.options import generation_options, sampling_options, stop_strings
from tformer_deploy.errors import InputError, UsageError, printable
from tformer_deploy.generation import Generator, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.batch.rows import Row


@click.command("run", short_help="Complete a file of prompts.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompts", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="JSONL of completions; - is stdout.")
@click.option("--max-batch", type=click.IntRange(1, 4096), default=16, show_default=True, help="Rows that run together.")
@click.option(
    "--bucket-edge", "edges", type=click.IntRange(1), multiple=True, help="Edge of a length bucket, in tokens; repeatable."
)
@click.option("--allow-errors", is_flag=True, help="Exit 0 even when some rows failed.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout.")
@generation_options
def command(
    bundle: Path, prompts: Path, output: Path, max_batch: int, edges: tuple[int, ...], allow_errors: bool, force: bool, as_json: bool,
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float, seed: int,
    prompt_lookup: int, stop: tuple[str, ...], backend: str, provider: ProviderName, engine: str | None, profile: ProfileName, threads: int | None,
) -> int:  # fmt: skip
    """Complete every row of PROMPTS (JSONL; - is stdin); results keep the order of the input.

    Flags are defaults; a row may set max_new_tokens, temperature, top_k, top_p, seed and stop for itself.
    """
    options = sampling_options(temperature, top_k, top_p, min_p, repetition_penalty)
    if as_json and str(output) == "-":
        raise UsageError("--json and -o - both write to stdout.", "Name an output file.")
    if prompts.exists() and output.exists() and prompts.samefile(output):
        raise UsageError(f"The output {output} is the prompts file.", "Name another output path.")
    if str(output) != "-" and bundle.resolve() in output.resolve().parents:
        raise UsageError(f"The output {output} lies in the bundle.", "Name a path outside the bundle.")
    require_consistent(backend, profile, provider, engine)
    opened = open_bundle(bundle)
    require_finite(opened)
    sink = OrderedFile(output, force)
    tokenizer = load_tokenizer(opened)
    defaults = Defaults(options, max_new_tokens, stop_strings(stop), seed)
    manifest = opened.manifest
    with _prompts(prompts) as file:
        found = scan(file)
        file.seek(0)
        if found.unknown:
            click.echo(f"Note: no row has the fields {', '.join(map(_proposed, found.unknown))}; they are ignored.", err=True)
        session = open_session(opened, backend=backend, threads=threads, profile=profile, provider=provider, engine=engine)
        for note in session.backend.notes:
            click.echo(f"Note: {note}", err=True)
        generator = Generator(session, tokenizer, manifest.eos_token_ids, prompt_lookup)
        # An engine may hold shorter rows than the bundle; longer ones then are error rows.
        rows = _first_error_said(read_rows(file, manifest.config, session.backend.max_length, tokenizer, defaults))
        with sink, _progress(found.rows) as step:
            summary = run_job(rows, generator, sink, max_batch, tuple(sorted(set(edges))) or DEFAULT_EDGES, step)
    if prompt_lookup:
        click.echo(f"Prompt lookup: {generator.right} of {generator.guessed} guesses were right.", err=True)
    if summary.cut_short:
        limit = session.backend.max_length
        click.echo(
            f"Note: {summary.cut_short} rows ended before their max_new_tokens: prompt and completion together have room for {limit}.",
            err=True,
        )
    _report(summary, as_json)
    return 1 if summary.failed and not allow_errors else 0


@contextlib.contextmanager
def _prompts(path: Path) -> Iterator[IO[bytes]]:
    """The file, seekable: it is read twice, so what comes through a pipe is first copied to a temporary file."""
    if str(path) == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise UsageError("The prompts are to come from stdin, which is closed.", "Name a file.")
        source: IO[bytes] = sys.stdin.buffer
    elif path.is_dir() or not path.exists():
        raise InputError(f"The prompts file {path} is {'a folder' if path.is_dir() else 'not there'}.", "Name a JSONL file.")
    else:
        source = path.open("rb")
    with contextlib.ExitStack() as stack:
        if str(path) != "-":
            stack.enter_context(source)
        if str(path) == "-" or not path.is_file():
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(source, copy)
            copy.seek(0)
            source = copy
        yield source


def _proposed(name: str) -> str:
    """The name of an unknown field, with the one that is most like it."""
    likely = difflib.get_close_matches(name[:80], FIELDS, 1)
    return f"{name!a} (meant is {likely[0]}?)" if likely else ascii(name)


def _first_error_said(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows; why the first bad one is, is said on stderr, since the others are often bad for the same reason."""
    said = False
    for row in rows:
        if row.error is not None and not said:
            said = True
            click.echo(f"Note: line {row.line} failed: {row.error.code}: {printable(row.error.message)}", err=True)
        yield row


@contextlib.contextmanager
def _progress(rows: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; elsewhere a line each tenth of the rows. On stderr."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("rows", total=rows)
            yield lambda: bar.advance(task)
        return
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done * 10 // max(rows, 1) != (done - 1) * 10 // max(rows, 1):
            click.echo(f"{done}/{rows} rows", err=True)

    yield step


def _report(summary: Summary, as_json: bool) -> None:
    click.echo(
        f"{summary.rows} rows, {summary.failed} failed; {summary.prompt_tokens} prompt and {summary.completion_tokens} completion tokens "
        f"in {summary.seconds:.1f} s: {summary.tokens_per_s:.1f} tokens/s; padding and idle slots {summary.padding_share:.1%}",
        err=True,
    )
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(summary) | {"tokens_per_s": summary.tokens_per_s}, sort_keys=True))
