"""Runs a family's ``read_config``; what is wrong is then said with the file and its own keys, whoever noticed it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.config import ModelConfig

# Our field → the keys that families read it from; a message of ModelConfig or RopeConfig names ours.
_KEYS: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "d_model": ("hidden_size", "n_embd", "embedding_length"),
    "n_layers": ("num_hidden_layers", "n_layer", "block_count"),
    "n_heads": ("num_attention_heads", "n_head", "attention.head_count"),
    "n_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length", "rope.dimension_count"),
    "d_ff": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "feed_forward_length"),
    "max_length": ("max_position_embeddings", "n_positions", "context_length"),
    "norm_eps": (
        "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "attention.layer_norm_rms_epsilon",
        "attention.layer_norm_epsilon",
    ),
    "window": ("sliding_window", "attention.sliding_window"),
    "window_layers": ("layer_types", "sliding_window_pattern"),
    "attention_scale": ("query_pre_attn_scalar", "attention_multiplier", "attention.scale"),
    "attention_softcap": ("attn_logit_softcapping", "attn_logit_softcap"),
    "logit_softcap": ("final_logit_softcapping", "final_logit_softcap"),
    "embedding_scale": ("embedding_multiplier", "embedding_scale"),
    "residual_scale": ("residual_multiplier", "residual_scale"),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "rope.theta": ("rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base", "rope.freq_base"),
    "rope": ("rope_parameters", "rope_scaling", "partial_rotary_factor", "rotary_pct", "rotary_dim"),
    "window_rope": ("rope_parameters", "rope_local_base_freq"),
}  # fmt: skip
Reader = TypeVar("Reader", bound=ConfigReader)
_LAYERS = 10_000  # more are a damaged config; a family makes lists of a layer's length
_OURS = re.compile(r"\b(rope\.theta|window_rope|" + "|".join(k for k in _KEYS if "." not in k) + r")\b")


def read_model(read_config: Callable[[Reader], ModelConfig], reader: Reader) -> ModelConfig:
    """What a family's ``read_config`` makes of ``reader``'s object; every key of it has been read then.

    Raises:
        InputError: It is none; the message begins with the reader's place, the hint says which keys to look at.
    """
    try:
        for key in _KEYS["n_layers"]:
            if key in reader.data:
                reader.take(key, int, 1, _LAYERS, default=None)
        config = read_config(reader)
    except InputError as error:
        raise _in_their_words(error, reader) from None
    reader.finish()
    return config


def _in_their_words(error: InputError, reader: ConfigReader) -> InputError:
    message = escaped(error.message if error.message.startswith(reader.place) else f"{reader.place}: {error.message}")
    if error.hint is not None:
        return InputError(message, error.hint)
    named = [key for ours in dict.fromkeys(_OURS.findall(error.message)) for key in _KEYS[ours] if key in reader.data]
    keys = " or ".join(dict.fromkeys(named)) if named else "it"
    return InputError(message, f"Correct {keys} there, or get the file again from where the checkpoint came.")
