"""Renders a checkpoint's chat template: foreign code, so sandboxed, in a child process with limits on time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tformer_deploy.errors import InputError, ResourceError, escaped

SECONDS = 2  # of CPU; a template takes milliseconds
MIB = 1024
_CHILD = Path(__file__).with_name("chat_sandbox.py")
_HINT = "Use another template, or leave --chat out."


def render(template: str, messages: list[dict[str, str]], bos_token: str, eos_token: str) -> str:
    """The prompt's text, ending where the assistant's turn begins.

    Raises:
        InputError: The template is faulty, or tries to leave the sandbox.
        ResourceError: It takes too long or too much memory.
    """
    request = {
        "template": template, "messages": messages, "bos_token": bos_token, "eos_token": eos_token, "seconds": SECONDS, "mib": MIB,
    }  # fmt: skip
    limit = f"The chat template took more than {SECONDS} s or {MIB} MiB."
    try:
        # -P: nothing beside the script is importable; the script itself imports the standard library and jinja2 alone.
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)], input=json.dumps(request).encode(), capture_output=True, timeout=4 * SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ResourceError(limit, _HINT) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ResourceError(limit, _HINT) from None
    if "error" in answer:
        raise InputError(f"The chat template cannot be used: {escaped(answer['error'])}", _HINT)
    if "limit" in answer:
        raise ResourceError(f"The chat template does too much: {escaped(answer['limit'])}", _HINT)
    text: str = answer["text"]
    return text
