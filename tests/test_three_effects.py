"""benchmarks/three_effects.py in its quick mode: it runs, and the effects are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "three_effects.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
def test_three_effects_when_run_quickly_then_shows_each_effect_as_a_ratio():
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=True, timeout=300)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["versions"]["torch"] in done.stdout.splitlines()[0]
    first, last = result["memory"]
    assert first["length"] * 4 == last["length"]
    assert last["fused_growth"] < 5  # linear: 4
    assert last["materialised_growth"] > 8  # quadratic: 16, less the linear share
    assert last["ratio"] > 2 * first["ratio"]
    assert all(row["ratio"] > 3 for row in result["decoding"])  # measured 15 to 42; a busy machine may blur times
    assert result["decoding"][-1]["ratio"] > result["decoding"][0]["ratio"]
    padding = result["padding"]
    assert 1 <= padding["bucketed_tokens"] < 1.1 < padding["arrival_tokens"]
    assert padding["bucketed_s"] < padding["arrival_s"]
