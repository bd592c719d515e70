"""The child process of ``chat.py``: JSON on stdin, JSON on stdout; a limit that is reached ends it without an answer."""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any, NoReturn

_OUTPUT = 2**22  # characters; no context is that long


def main() -> None:
    """Renders one template under limits; everything needed is imported before they hold."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    request: dict[str, Any] = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (request["seconds"], request["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (request["mib"] << 20, request["mib"] << 20))
    try:
        # tools and documents: templates written for transformers ask whether they are none.
        text = environment.from_string(request["template"]).render(
            messages=request["messages"], bos_token=request["bos_token"], eos_token=request["eos_token"],
            add_generation_prompt=True, tools=None, documents=None,
        )  # fmt: skip
        answer = json.dumps({"text": text} if len(text) <= _OUTPUT else {"limit": f"it writes more than {_OUTPUT} characters"})
    except MemoryError:
        return
    except (OverflowError, RecursionError) as e:  # a range that is too long, macros that call each other without end
        answer = json.dumps({"limit": str(e)[:300]})
    except Exception as e:
        answer = json.dumps({"error": f"{type(e).__name__}: {str(e)[:300]}"})
    print(answer)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)


if __name__ == "__main__":
    main()
