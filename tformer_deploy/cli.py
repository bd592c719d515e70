"""The console script: finds commands by name, and turns errors into text and exit codes, in this one place."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from typing import Any

import click

from tformer_deploy.errors import ResourceError, StorageError, TformerError, printable
from tformer_deploy.interrupts import insistent_signals

# Command name → module in tformer_deploy.commands, imported only when it is asked for: `generate` needs no torch.
COMMANDS = {
    "export": "export",
    "build-engine": "build_engine",
    "check": "check",
    "seal": "seal",
    "run": "run",
    "generate": "generate",
    "bench": "bench",
    "inspect": "inspect",
    "doctor": "doctor",
}


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of a user's work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command, or None when there is none of that name."""
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"tformer_deploy.commands.{COMMANDS[name]}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tformer-deploy")
@click.option("--debug", is_flag=True, help="Show a traceback with an error.")
def cli(debug: bool) -> None:
    """Export decoder-only transformers to prefill and decode graphs, prove them equal to PyTorch, and run them."""


def main(argv: list[str] | None = None) -> None:
    """Runs one command and ends the process with its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Runs one command; returns the exit code (docs/ci.md lists them)."""
    with insistent_signals() as came:
        return _run(arguments, came)


def _run(arguments: list[str], came: list[int]) -> int:
    debug = "--debug" in arguments[:1]
    try:
        result: Any = cli.main(args=arguments, prog_name="tformer-deploy", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.ClickException as e:
        e.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return _stopped()
    except BrokenPipeError:
        # Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as e:
        if signal.SIGINT in came:  # inside an import Ctrl-C becomes some other error
            return _stopped()
        if debug:
            raise
        return _report(e)
    return result if isinstance(result, int) else 0


def _stopped() -> int:
    click.echo("Stopped by Ctrl-C.", err=True)
    return 130


class _DefectError(TformerError):
    """Any other exception: not the user's fault (exit 1)."""

    exit_code = 1


def _report(error: Exception) -> int:
    if isinstance(error, OSError) and not isinstance(error, TformerError):
        where = f" ({error.filename})" if error.filename else ""
        free = "Free some space and run the command again." if error.errno == errno.ENOSPC else None
        error = StorageError(f"{error.strerror or error}{where}.", free)
    elif isinstance(error, MemoryError):
        error = ResourceError("Memory ran out.", "Lower --max-batch or --max-length, or use a machine with more memory.")
    if not isinstance(error, TformerError):
        hint = "This is a defect of tformer-deploy: run again as `tformer-deploy --debug …` and report what it prints."
        error = _DefectError(f"{type(error).__name__}: {error}", hint)
    # One line, so that the last line of stderr says everything; a report within a message keeps its own lines.
    click.echo(f"Error: {_shown(error.message)}" + (f" → {_shown(error.hint)}" if error.hint else ""), err=True)
    return error.exit_code


def _shown(text: str) -> str:
    """Without what would steer a terminal: a path or a library's words may hold anything."""
    return "\n".join(printable(line) for line in text.split("\n"))


if __name__ == "__main__":
    main()
