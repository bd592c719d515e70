"""Every block of the README that carries a test mark is run, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- test: (\w+) -->\n```(sh|python)\n(.*?)```", re.DOTALL)
BLOCKS = [(m[1], m[2], m[3]) for m in BLOCK.finditer((ROOT / "README.md").read_text("utf-8"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    (path / "samples").symlink_to(ROOT / "samples")
    (path / "demo").mkdir()
    return path


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "ORT_DISABLE_TELEMETRY": "1"}


def shell(lines: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_readme_when_read_then_has_the_blocks_that_are_run():
    assert [mark for mark, _, _ in BLOCKS] == ["tour", "bits", "engine", "python", "python", "python", "smollm"]


def test_tour_bits_engine_and_python_blocks_when_run_in_order_then_succeed(folder: Path):
    for mark, language, text in BLOCKS:
        if mark in {"tour", "bits", "engine"}:
            assert language == "sh"
            shell(text, folder)
    python = "\n".join(text for mark, _, text in BLOCKS if mark == "python")
    done = subprocess.run(
        [sys.executable, "-c", python], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 1e-4
    assert len((folder / "demo" / "tour.jsonl").read_text("utf-8").splitlines()) == len(
        (ROOT / "samples" / "prompts.jsonl").read_text("utf-8").splitlines()
    )


@pytest.mark.slow
def test_real_model_block_when_run_then_paris_is_the_capital(folder: Path, smollm2_gguf: Path):
    (text,) = (text for mark, _, text in BLOCKS if mark == "smollm")
    lines = [line for line in text.splitlines() if not line.startswith("pip ")]
    assert "Paris" in shell("\n".join(lines), folder)
