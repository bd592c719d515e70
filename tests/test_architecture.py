"""The shape that ARCHITECTURE.md draws: import directions, module sizes, names, and what importing needs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted([*(ROOT / "tformer_deploy").rglob("*.py"), *(ROOT / "exporters").rglob("*.py")])

# A layer may import those on its left in the package, and itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "strict_json": {"errors"},
    "config": {"errors"},
    "parameters": {"config"},
    "bundle": {"errors", "strict_json", "config", "parameters", "backends"},  # backends: Bundle.session(), by name at call time
    "checkpoints": {"errors", "strict_json", "config", "parameters"},
    "reference": {"errors", "strict_json", "config", "checkpoints"},
    "quantization": {"errors", "strict_json", "config", "parameters", "bundle", "reference"},
    "backends": {"errors", "strict_json", "config", "bundle", "reference", "checkpoints", "quantization"},
    "generation": {"errors", "strict_json", "config", "bundle", "backends"},
    "batch": {"errors", "strict_json", "config", "bundle", "backends", "generation"},
    "bench": {"errors", "config", "parameters", "bundle", "backends"},
    "parity": {"errors", "strict_json", "config", "bundle", "checkpoints", "reference", "quantization", "backends"},
    "exporters": {
        "errors", "strict_json", "config", "parameters", "bundle", "checkpoints", "reference", "quantization", "backends", "parity",
    },
}  # fmt: skip
BANNED = re.compile(r"(^|_)(utils?|helpers?|common|misc|managers?|extra_options)(_|$)", re.IGNORECASE)


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "tformer_deploy" else parts[0]


def imported_layers(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("tformer_deploy.")]
    return {p[1] for p in parts}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_when_read_from_the_source_then_follow_the_direction(path: Path):
    name = layer(path)
    if name in ALLOWED:
        assert imported_layers(path) & (set(ALLOWED) | {"commands", "cli", "api"}) <= ALLOWED[name] | {name}
    else:  # commands, cli, api and the package itself sit on top, and reach exporters by importlib only
        assert "exporters" not in imported_layers(path)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_when_counted_then_has_at_most_600_lines_and_no_vague_name(path: Path):
    assert len(path.read_text("utf-8").splitlines()) <= 600
    assert not BANNED.search(path.stem)
    names = {n.name for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assert not [n for n in names if BANNED.search(n)]


def test_package_when_imported_then_needs_neither_torch_nor_onnx_nor_tensorrt():
    code = (
        "import sys, tformer_deploy, tformer_deploy.cli, tformer_deploy.bundle, tformer_deploy.backends, tformer_deploy.generation,"
        " tformer_deploy.batch, tformer_deploy.commands.run, tformer_deploy.commands.generate, tformer_deploy.commands.inspect;"
        "print([m for m in ('torch', 'onnx', 'tensorrt', 'tensorrt_rtx', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_exporters_when_imported_under_another_name_then_refuse():
    done = subprocess.run([sys.executable, "-c", "import exporters"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "tformer_deploy.exporters" in done.stderr


def test_repository_when_searched_then_holds_no_path_of_one_machine():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    texts = [
        ROOT / f for f in tracked if f.endswith((".py", ".md", ".toml", ".txt", ".sh", ".cpp", ".json")) and (ROOT / f).is_file()
    ]
    pattern = re.compile(r"/(work|tmp|root|home)/[A-Za-z0-9_.]")
    found = [str(f) for f in texts if f.name != "test_architecture.py" and pattern.search(f.read_text("utf-8", errors="ignore"))]
    assert not [f for f in found if "/tests/" not in f]
