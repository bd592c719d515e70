"""The bench of the product's gate: a fault goes into a copy of a bundle, ``check`` runs on it as it does for a user."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

import tformer_deploy
from mutation.mutant import Metric, Mutant, Reading, Readings
from tformer_deploy.bundle.seal import seal
from tformer_deploy.config import DType, ModelConfig, RopeConfig
from tformer_deploy.parity import Report, check_bundle

# Between them they have everything that a graph can have. The plan's rows are longer than the window.
MODELS: dict[str, ModelConfig] = {
    "llama": LLAMA_LIKE,
    "gpt2": GPT2_LIKE,
    "windows": ModelConfig(
        vocab_size=131, d_model=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=96, max_length=256, post_norm=True,
        qk_norm="head", activation="gelu_tanh", rope=RopeConfig(), window=8, window_layers=(0, 2), window_rope=RopeConfig(theta=100.0),
        attention_scale=0.3, attention_softcap=4.0, embedding_scale=8.0, logit_softcap=10.0,
    ),
    "parallel": ModelConfig(
        vocab_size=131, d_model=64, n_layers=3, n_heads=4, n_kv_heads=1, head_dim=16, d_ff=128, max_length=256, norm="layernorm",
        norm_bias=False, qk_norm="each_head", activation="gelu", gated=False, residual="parallel", residual_scale=0.3,
        rope=RopeConfig(dim=8), nope_layers=(1,), logit_scale=0.25, head_bias=True, tied=False,
    ),
    "alibi": ModelConfig(
        vocab_size=131, d_model=72, n_layers=3, n_heads=6, n_kv_heads=6, head_dim=12, d_ff=96, max_length=256, norm="layernorm",
        activation="gelu_tanh", gated=False, positions="alibi", embedding_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
}  # fmt: skip
# The same faults must show under the wider lines of half precision.
MODELS |= {"llama-fp16": LLAMA_LIKE, "llama-bf16": LLAMA_LIKE}
DTYPES: dict[str, DType] = {"llama-fp16": "fp16", "llama-bf16": "bf16"}
WEIGHTS = ("weights", "tensors that differ from the checkpoint")
ONE_MORE = ("prefill n+1 against prefill n, decode 1", "max abs")


@dataclass(frozen=True)
class GateMutant(Mutant):
    """A fault in a bundle of one of :data:`MODELS`.

    Attributes:
        edit: Changes a graph, or the folder of the bundle.
        model: Whose bundle.
        phase: The graph that is edited, or ``files``.
    """

    edit: Callable[..., None] = field(default=lambda _: None, compare=False)
    model: str = "llama"
    phase: str = "files"

    @property
    def unchanged(self) -> str:
        """The model's bundle."""
        return self.model

    def misplaces(self, metric: Metric) -> bool:
        """A graph's fault is not one of the weights, and decode's not one of prefill (but where the two must meet)."""
        in_prefill = metric[0].startswith("prefill") and metric != ONE_MORE
        return (self.phase != "files" and metric == WEIGHTS) or (self.phase == "decode" and in_prefill)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Small models run fastest in one thread; and what is loaded by now is not looked through at each collection of garbage,
    of which a check makes two to bound its memory.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()


class GateBench:
    """Exports each model once and keeps it."""

    def __init__(self, folder: Path, exported: dict[str, tuple[Path, Path]] | None = None) -> None:
        """``exported``: bundles and checkpoints of models of :data:`MODELS` that are there already."""
        self.folder = folder
        self.bundles = dict(exported or {})
        self.controls: dict[str, Readings] = {}

    def bundle(self, model: str) -> tuple[Path, Path]:
        """The unchanged bundle and its checkpoint."""
        if model not in self.bundles:
            checkpoint, bundle = self.folder / model, self.folder / f"{model}.bundle"
            hot_decoder(MODELS[model]).save_pretrained(checkpoint)
            tformer_deploy.export(checkpoint, bundle, dtype=DTYPES.get(model, "fp32"), check=False)
            self.bundles[model] = bundle, checkpoint
            gc.collect()
            gc.freeze()
        return self.bundles[model]

    def control(self, mutant: Mutant) -> Readings:
        """The unchanged bundle's."""
        assert isinstance(mutant, GateMutant)
        if mutant.model not in self.controls:
            self.controls[mutant.model] = readings(check_bundle(*self.bundle(mutant.model)))
        return self.controls[mutant.model]

    def measure(self, mutant: Mutant) -> Readings:
        """The edited copy's."""
        assert isinstance(mutant, GateMutant)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            bundle, checkpoint = self.bundle(mutant.model)
            path = Path(folder) / "mutant.bundle"
            shutil.copytree(bundle, path)
            if mutant.phase == "files":
                mutant.edit(path)
            else:
                edit_graph(path / f"{mutant.phase}.onnx", mutant.edit)
            seal(path)
            return readings(check_bundle(path, checkpoint))


def edit_graph(file: Path, edit: Callable[[onnx.GraphProto], None]) -> None:
    """Loads a graph, changes it, writes it."""
    model = onnx.load(file, load_external_data=False)
    edit(model.graph)
    file.write_bytes(model.SerializeToString())


def readings(report: Report) -> Readings:
    """Every metric of a report."""
    return {
        (c.group, c.metric): Reading(
            c.value, f"{c.relation} {c.gate:g}" if c.gate is not None else c.verdict, c.verdict == "red", "max abs" in c.metric
        )
        for c in report.checks
    }
