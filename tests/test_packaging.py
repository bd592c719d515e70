"""The built wheel and sdist, installed in clean environments, run a bundle without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*words: object, cwd: Path) -> str:
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_package_when_installed_in_a_clean_environment_then_runs_a_bundle_without_torch(kind: str, tmp_path: Path):
    from tformer_deploy.api import export

    bundle = export(ROOT / "samples" / "shakespeare", tmp_path / "bundle", check=False)
    source = tmp_path / "source"
    run("git", "clone", "-q", ROOT, source, cwd=tmp_path)
    run(sys.executable, "-m", "build", f"--{kind}", "-o", tmp_path / "dist", source, cwd=tmp_path)
    (package,) = (tmp_path / "dist").iterdir()
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{package}[cpu]", cwd=tmp_path)
    script = tmp_path / "env" / "bin" / "tformer-deploy"
    assert run(script, "generate", bundle, "ROMEO:", "--max-new-tokens", "5", cwd=tmp_path).strip()
    packages = run(python, "-m", "pip", "list", cwd=tmp_path)
    assert "torch" not in packages
    assert "tensorrt" not in packages
    listed = "import importlib.util as u; print(u.find_spec('tformer_deploy.exporters.onnx') is not None)"
    assert run(python, "-c", listed, cwd=tmp_path).strip() == "True"
    done = subprocess.run([script, "export", bundle, "-o", tmp_path / "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "pip install" in done.stderr
