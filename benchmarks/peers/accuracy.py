"""Accuracy of quantised models of one checkpoint, ours and onnxruntime-genai's, against our fp32 bundle on a text.

    python benchmarks/peers/accuracy.py --fp32 BUNDLE --text FILE --bundle int4-b128=BUNDLE … [--genai int4=FOLDER …] [--rows 200]

genai's graphs give logits of the last position alone, so each row is one window of the text of 16 to 256 tokens (the first tokens make
little difference between models) and one position that is compared. FOLDER is what ``run.py`` leaves in ``DIR/models/NAME/genai-PRECISION``;
its graph runs in plain ONNX Runtime. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from tformer_deploy import open_bundle
from tformer_deploy.backends.graph import PROVIDER, import_runtime
from tformer_deploy.generation import load_tokenizer
from tformer_deploy.parity.metrics import KL, SAME_BEST, measure

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Logits = NDArray[np.float32]

_SHORTEST, _LONGEST = 16, 256


def main() -> None:
    options = arguments()
    reference = open_bundle(options.fp32)
    tokenizer = load_tokenizer(reference)
    assert tokenizer is not None, f"{options.fp32} has no tokenizer"
    ids = tokenizer.encode(options.text.read_text("utf-8"))
    rows = windows(ids, options.rows)
    wanted = ours(options.fp32)
    truth = np.stack([wanted(row) for row in rows])
    del wanted
    result: dict[str, Any] = {}
    models: dict[str, Callable[[], Callable[[list[int]], Logits]]] = {}
    models |= {f"ours {name}": (lambda path=path: ours(path)) for name, path in map(named, options.bundle)}
    models |= {f"genai {name}": (lambda path=path: genai(path)) for name, path in map(named, options.genai)}
    for name, load in models.items():
        run = load()
        table = measure(truth, np.stack([run(row) for row in rows]))
        result[name] = {"mean_kl": float(table[:, KL].mean()), "same_top1": float(table[:, SAME_BEST].mean())}
    shown = Table(
        "model", "mean KL", "same top-1", title=f"against {options.fp32.name}, {len(rows)} positions of {options.text.name}"
    )
    for name, figures in result.items():
        shown.add_row(name, f"{figures['mean_kl']:.4g}", f"{figures['same_top1']:.1%}")
    Console(width=100).print(shown)
    print(json.dumps({"rows": len(rows), "onnxruntime": version("onnxruntime"), "models": result}))


def windows(ids: list[int], count: int) -> list[list[int]]:
    """Rows at even distances, of lengths that are spread between the shortest and the longest."""
    random = np.random.Generator(np.random.Philox(key=11))
    lengths = random.integers(_SHORTEST, _LONGEST + 1, count)
    starts = np.linspace(0, len(ids) - _LONGEST - 1, count).astype(int)
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def ours(path: Path) -> Callable[[list[int]], Logits]:
    """Row → logits [V] of its last position, in the profile that is chosen for this processor."""
    session = open_bundle(path).session()
    return lambda row: session.prefill([row])[0]


def genai(folder: Path) -> Callable[[list[int]], Logits]:
    """The same of one of genai's graphs; its caches start empty."""
    runtime = import_runtime()
    settings = runtime.SessionOptions()
    settings.log_severity_level = 3
    session = runtime.InferenceSession(str(folder / "model.onnx"), settings, providers=[PROVIDER])
    config = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]["decoder"]
    heads, dim = config["num_key_value_heads"], config["head_size"]
    inputs = {i.name for i in session.get_inputs()}
    past = {name: np.zeros((1, heads, 0, dim), np.float32) for name in inputs if name.startswith("past_key_values")}

    def run(row: list[int]) -> Logits:
        fed: dict[str, Any] = past | {"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), np.int64)}
        if "position_ids" in inputs:
            fed["position_ids"] = np.arange(len(row))[None]
        logits: Logits = session.run(["logits"], fed)[0][0, -1]
        return logits

    return run


def named(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, Path(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp32", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bundle", action="append", default=[], metavar="NAME=BUNDLE")
    parser.add_argument("--genai", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rows", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
