"""The keys that architectures share, and what only the presence of a tensor says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tformer_deploy.checkpoints.families.sizes import Sizes
from tformer_deploy.checkpoints.reader import ConfigReader, head_dim
from tformer_deploy.checkpoints.windows import Windows
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.file import GgufFile

_NAMESPACES = ("general.", "tokenizer.", "quantize.", "split.")  # nothing in them changes the forward pass
_PATTERN = "attention.sliding_window_pattern"


class Biases(NamedTuple):
    """As ``ModelConfig`` holds them."""

    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool


class GgufReader(ConfigReader):
    """The keys of one architecture, without its name before them.

    Args:
        file: The opened file.
        architecture: Its ``general.architecture``.
        max_length: As :class:`ConfigReader` takes it.

    Attributes:
        taken: Tensors that :meth:`vector` read; the model has none of that name.
    """

    def __init__(self, file: GgufFile, architecture: str, max_length: int | None) -> None:
        start = f"{architecture}."
        data = {
            key.removeprefix(start): _decimal(value)
            for key, value in file.metadata.items()
            if not key.startswith(_NAMESPACES)
        }  # fmt: skip
        super().__init__(data, f"{escaped(file.path.name)} ({start}*)", max_length)
        self.file = file
        self.taken: list[str] = []

    def has(self, tensor: str) -> bool:
        """Whether the file has this tensor."""
        return tensor in self.file.entries

    @property
    def tied(self) -> bool:
        """No tensor for the head: it is the embedding."""
        return not self.has("output.weight")

    def vector(self, tensor: str, length: int) -> tuple[float, ...] | None:
        """The numbers of a small tensor, or None where the file has none.

        Raises:
            InputError: Its shape or dtype is another.
        """
        if not self.has(tensor):
            return None
        entry = self.file.entries[tensor]
        if entry.shape != (length,) or entry.dtype != "fp32":
            raise InputError(f"{self.place}: {tensor} is {entry.dtype} {list(entry.shape)}; expected fp32 {[length]}.")
        self.taken.append(tensor)
        return tuple(self.file.rows(tensor, 0, length).tolist())

    def sizes(self) -> Sizes:
        """Widths and counts.

        Raises:
            InputError: One is missing, out of range, or they do not fit; or the model has experts.
        """
        self.require("attention.causal", True)
        self.require("pooling_type", 0)
        for key in ("expert_count", "expert_used_count"):
            if self.take(key, int, 0, default=0):
                raise InputError(f"{self.place}: the model has a mixture of experts ({key}), which is not supported.")
        width, heads = self.take_size("embedding_length"), self.take_size("attention.head_count")
        dim = self.take_size("attention.key_length", default=None)
        if dim is None:
            dim = head_dim(self.place, ("embedding_length", width), ("attention.head_count", heads))
        self.require("attention.value_length", dim)
        table = self.file.entries.get("token_embd.weight")
        return Sizes(
            vocab_size=self.take_size("vocab_size", default=table.shape[0] if table else 1),
            d_model=width,
            n_layers=self.take_size("block_count"),
            n_heads=heads,
            n_kv_heads=self.take_size("attention.head_count_kv", default=heads),
            head_dim=dim,
            d_ff=self.take_size("feed_forward_length"),
        )

    def rms_eps(self) -> float:
        """What an RMSNorm adds to the variance."""
        return float(self.take("attention.layer_norm_rms_epsilon", float, 0.0, 1.0))

    def layer_norm_eps(self) -> float:
        """What a LayerNorm adds to the variance."""
        return float(self.take("attention.layer_norm_epsilon", float, 0.0, 1.0))

    def biases(self) -> Biases:
        """Where the first block has biases; no key says so."""
        qkv = self.has("blk.0.attn_q.bias") or self.has("blk.0.attn_qkv.bias")
        return Biases(qkv, self.has("blk.0.attn_output.bias"), self.has("blk.0.ffn_down.bias"))

    def softcap(self, key: str, default: float | None = None) -> float | None:
        """A soft cap; 0 is none."""
        value: float | None = self.take(key, float, 0.0, 1e9, default=default)
        return value or None

    def windows(self, n_layers: int, max_length: int, period: int, default: int = 0) -> Windows:
        """``attention.sliding_window``, in all layers but every ``period``-th (0: in all), or as ``…_pattern`` says.

        A window as long as the longest row hides nothing and is left out.

        Raises:
            InputError: The window is below 0, or the pattern does not fit the layers.
        """
        size = self.take("attention.sliding_window", int, 0, 2**31 - 1, default=default)
        if isinstance(self.data.get(_PATTERN), list):
            listed = self.take(_PATTERN, list)
            if len(listed) != n_layers or any(type(item) is not bool for item in listed):
                raise InputError(
                    f"{self.place}: {_PATTERN} has {len(listed)} items; expected {n_layers} truth values, one a layer."
                )
        else:
            period = self.take(_PATTERN, int, 0, default=period)
            listed = [not period or layer % period < period - 1 for layer in range(n_layers)]
        layers = tuple(layer for layer, windowed in enumerate(listed) if windowed)
        return Windows(size, layers) if layers and 0 < size < max_length else Windows(None, ())


def _decimal(value: Any) -> Any:
    """Floats are stored in 32 bits; the shortest decimal that rounds to one is what was written (1e-5, not 9.99999975e-06)."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        stored = np.float32(value)
    return float(str(stored)) if float(stored) == value else value
