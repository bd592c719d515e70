"""A virtual environment for each peer, and its converted models: made once, remembered by what they were made from."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent


class UnmetError(Exception):
    """A peer does not install, convert or run; the message is the line that says why."""


def python_of(peer: str, module: ModuleType, out: Path) -> Path:
    """The interpreter of a peer's environment, installed where it is not there yet; our own runs in this one.

    Raises:
        UnmetError: pip failed.
    """
    if not module.REQUIREMENTS:
        return Path(sys.executable)
    folder = out / "env" / peer
    python, done = folder / "bin" / "python", folder / "installed.json"
    removed: tuple[str, ...] = getattr(module, "REMOVED", ())
    wanted = json.dumps([module.REQUIREMENTS, removed, getattr(module, "BUILD", {})], sort_keys=True)
    if done.exists() and done.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", *module.REQUIREMENTS]
    _logged(command, out / "logs" / f"{peer}-install.log", out, getattr(module, "BUILD", {}))
    if removed:
        _logged([str(python), "-m", "pip", "uninstall", "-y", *removed], out / "logs" / f"{peer}-uninstall.log", out)
    done.write_text(wanted)
    return python


def model_of(peer: str, module: ModuleType, python: Path, checkpoint: Path, precision: str, out: Path) -> Path:
    """A peer's form of a checkpoint in a precision, converted where it is not there yet.

    Raises:
        UnmetError: The conversion failed.
    """
    name = checkpoint.name
    folder, record = out / "models" / name / f"{peer}-{precision}", out / "models" / name / f"{peer}-{precision}.json"
    recipe = inspect.getsource(module.convert).encode() + (checkpoint / "config.json").read_bytes()
    wanted = json.dumps({"checkpoint": str(checkpoint.resolve()), "sha256": hashlib.sha256(recipe).hexdigest()})
    if record.exists() and record.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [str(python), script(peer), "convert", str(checkpoint), precision, str(folder)]
    try:
        _logged(command, out / "logs" / f"{name}-{peer}-{precision}-convert.log", out)
    except UnmetError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    record.write_text(wanted)
    return folder


def script(peer: str) -> str:
    """The file of a peer."""
    return str(HERE / f"{peer}_peer.py")


def variables(out: Path) -> dict[str, str]:
    """The environment of every child: nothing is fetched, and what is derived stays under ``out``."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
        "XDG_CACHE_HOME": str(out / "cache"),
        "HF_HOME": str(out / "cache" / "huggingface"),
    }


def _logged(command: list[str], log: Path, out: Path, more: dict[str, str] | None = None) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = variables(out) | (more or {})
    if "pip" in command:
        environment = dict(os.environ) | (more or {})
    with log.open("w") as file:
        done = subprocess.run(command, check=False, stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        raise UnmetError(f"{error_line(log.read_text(errors='replace'))} ({log.name})")


def error_line(text: str) -> str:
    """The line of a log that names the error: the last one that looks like one, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A traceback that subprocess or a driver adds says less than the one before it.
    telling = [line for line in lines if "Error" in line or line.lower().startswith("error") or " error: " in line]
    telling = [line for line in telling if "CalledProcessError" not in line] or telling
    return (telling or lines or ["it printed nothing"])[-1][:300]
