"""Memory of this process as the kernel counts it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_PROC = Path("/proc/self")
_KIB = 1024.0


def peak_mib() -> float:
    """The most memory resident at once, MiB: since :func:`reset_peak` on Linux, since the start elsewhere."""
    peak = _field(_PROC / "status", "VmHWM")
    if peak is not None:
        return peak
    # macOS counts in bytes, others in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (_KIB**2 if sys.platform == "darwin" else _KIB)


def proportional_mib() -> float | None:
    """Resident memory with shared pages divided among the processes that map them, MiB; None where the kernel does not say."""
    return _field(_PROC / "smaps_rollup", "Pss")


def reset_peak() -> bool:
    """Starts the peak again from what is resident now; whether the kernel can."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _field(path: Path, name: str) -> float | None:
    """A field in kB of one of the process's files, as MiB."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) / _KIB for line in lines if line.startswith(f"{name}:")), None)
