"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

# Columns in a file or a pipe, where nothing says how many there are: no table here needs more.
_WIDTH = 140


def wide_console() -> Console:
    """stdout: as wide as the terminal; elsewhere wide enough that no cell is cut."""
    found = Console()
    return found if found.is_terminal else Console(width=max(found.width, _WIDTH))
