"""The sizes that most configs spell alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tformer_deploy.checkpoints.reader import head_dim

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


class Sizes(NamedTuple):
    """As ``ModelConfig`` holds them."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int


def read_sizes(reader: ConfigReader, dim: int | None = None, kv_heads: int | None = None) -> Sizes:
    """``vocab_size``, ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim`` and
    ``intermediate_size``.

    Args:
        reader: The config.
        dim: The family's width of a head where the config has none; the heads share ``hidden_size`` where None.
        kv_heads: The family's key/value heads where the config has none; as many as heads where None.

    Raises:
        InputError: One is missing, out of range, or they do not fit.
    """
    width, heads = reader.take_size("hidden_size"), reader.take_size("num_attention_heads")
    dim = reader.take_size("head_dim", default=dim)
    if dim is None:
        dim = head_dim(reader.place, ("hidden_size", width), ("num_attention_heads", heads))
    return Sizes(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=reader.take_size("num_key_value_heads", default=kv_heads or heads),
        head_dim=dim,
        d_ff=reader.take_size("intermediate_size"),
    )
