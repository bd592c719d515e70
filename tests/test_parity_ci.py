"""The CI recipe: it parses, its commands exist, and its steps do what docs/ci.md says when they are run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import click
import pytest
import yaml
from conftest import ROOT

from tformer_deploy import api, errors
from tformer_deploy.cli import cli

RECIPE = ROOT / "samples" / "ci" / "parity.yml"
DOCUMENT = ROOT / "docs" / "ci.md"


def jobs() -> dict[str, dict]:
    return yaml.safe_load(RECIPE.read_text("utf-8"))["jobs"]


def scripts(job: str) -> list[str]:
    """The shell scripts of a job that call us, in order."""
    return [step["run"] for step in jobs()[job]["steps"] if "tformer-deploy " in step.get("run", "")]


def calls(text: str) -> list[list[str]]:
    """The words of every call of ours in a shell script."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.strip().startswith("tformer-deploy ")]


def all_calls() -> list[list[str]]:
    found = [call for job in jobs() for script in scripts(job) for call in calls(script)]
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text("utf-8") + (ROOT / "docs" / "parity.md").read_text("utf-8"), re.S)
    return [*found, *(call for block in blocks for call in calls(re.sub(r"  #.*", "", block)))]


@pytest.mark.parametrize("words", all_calls(), ids=" ".join)
def test_recipe_when_it_calls_a_command_then_the_command_and_its_flags_exist(words):
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    command.make_context(words[0], words[1:])  # refuses an unknown flag, a missing value, an argument too many


def test_recipe_when_read_then_gates_pull_requests_and_uploads_what_it_wrote():
    workflow = yaml.safe_load(RECIPE.read_text("utf-8"))
    assert "pull_request" in workflow[True]  # YAML 1.1 reads the key `on` so
    assert len(all_calls()) == 7
    (check,) = [call for call in all_calls() if "--junit" in call and "--report" in call and "$BUNDLE" in call]
    assert {"--full", "--bisect", "--checkpoint"} <= set(check)
    steps = workflow["jobs"]["parity"]["steps"]
    (upload,) = [s for s in steps if s.get("if") == "always()"]
    kept = upload["with"]["path"].split()
    written = [
        check[check.index(flag) + 1].replace("$BUNDLE", workflow["env"]["BUNDLE"]) for flag in ("--report", "--junit", "--html")
    ]
    assert sorted(kept) == sorted(written)
    assert not any(s.get("continue-on-error") for job in workflow["jobs"].values() for s in job["steps"])
    assert workflow["jobs"]["deploy"]["needs"] == "parity"


def shell(script: str, folder: Path, checkpoint: Path) -> int:
    """Runs a step as GitHub does: bash, stopping at the first error."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CHECKPOINT": str(checkpoint), "BUNDLE": "build/model.bundle",
    }  # fmt: skip
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False).returncode


def test_recipe_when_its_steps_are_run_then_right_graphs_pass_and_wrong_ones_do_not(llama_checkpoint, tmp_path):
    export, check = scripts("parity")
    (require,) = scripts("deploy")
    assert shell(export, tmp_path, llama_checkpoint) == 0
    assert shell(require, tmp_path, llama_checkpoint) == 3  # there is no report yet
    assert shell(check, tmp_path, llama_checkpoint) == 0
    assert ET.parse(tmp_path / "build" / "parity.xml").getroot().get("failures") == "0"
    assert (tmp_path / "build" / "parity.html").is_file()
    assert shell(require, tmp_path, llama_checkpoint) == 0
    # The graphs are exchanged for those of a build with a fault in it; the old report stays.
    from test_parity_check import spoiled

    bundle = tmp_path / "build" / "model.bundle"
    wrong = spoiled(bundle, tmp_path / "wrong", 5.0)
    shutil.rmtree(bundle)
    wrong.rename(bundle)
    assert shell(require, tmp_path, llama_checkpoint) == 3
    assert shell(check, tmp_path, llama_checkpoint) == 1
    assert int(ET.parse(tmp_path / "build" / "parity.xml").getroot().get("failures")) > 0
    assert shell(require, tmp_path, llama_checkpoint) == 1


def test_exit_codes_when_documented_then_are_those_of_the_errors():
    table = dict(re.findall(r"^\| ([0-9, ]+) \| ([^|]+)\|", DOCUMENT.read_text("utf-8"), re.M))
    documented = {int(code) for codes in table for code in codes.split(",")}
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.TformerError)]
    raised = {c.exit_code for c in [*classes, api.ParityError]}
    assert documented == raised | {0, 130, 143, 141}
    readme = (ROOT / "README.md").read_text("utf-8")
    assert {int(c) for codes in re.findall(r"^\| ([0-9, ]+) \|", readme, re.M) for c in codes.split(",")} == documented
