"""Renders a checkpoint's chat template: foreign code, so sandboxed, in a child process with limits on time and memory."""

from __future__ import annotations

import datetime
import json
import resource
import subprocess
import sys
from typing import Any, NoReturn

from tformer_deploy.errors import InputError, ResourceError

_SECONDS = 5
_BYTES = 2**30
_OUTPUT = 2**24
_HINT = "Use another template, or leave --chat out."


def render(template: str, messages: list[dict[str, str]], bos_token: str, eos_token: str) -> str:
    """The prompt's text, ending where the assistant's turn begins.

    Raises:
        InputError: The template is faulty, or tries to leave the sandbox.
        ResourceError: It takes too long or too much memory.
    """
    request = {"template": template, "messages": messages, "bos_token": bos_token, "eos_token": eos_token}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tformer_deploy.generation.chat"],
            input=json.dumps(request).encode(), capture_output=True, timeout=4 * _SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ResourceError(f"The chat template did not end within {4 * _SECONDS} s.", _HINT) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ResourceError(f"The chat template took more than {_SECONDS} s or {_BYTES >> 20} MiB.", _HINT) from None
    if "error" in answer:
        raise InputError(f"The chat template cannot be used: {answer['error']}", _HINT)
    text: str = answer["text"]
    return text


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    request = json.load(sys.stdin)
    try:
        text = _render(request)
    except MemoryError:
        sys.exit(1)
    except Exception as e:
        print(json.dumps({"error": f"{type(e).__name__}: {str(e)[:300]}"}))
        return
    if len(text) > _OUTPUT:
        sys.exit(1)
    print(json.dumps({"text": text}))


def _render(request: dict[str, Any]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now(tz=datetime.UTC).strftime(form)
    return environment.from_string(request["template"]).render(
        messages=request["messages"], bos_token=request["bos_token"], eos_token=request["eos_token"], add_generation_prompt=True
    )


if __name__ == "__main__":
    _main()
