"""Rotary positions of a GGUF file: ``rope.*``, and tensors by which frequencies are divided."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tformer_deploy.config import RopeConfig
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader

_KINDS = {kind: kind for kind in ("none", "linear", "yarn", "longrope")}
_DIVISORS, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_HINT = "Export from the model's Hugging Face folder."


def read_rope(reader: GgufReader, head_dim: int, max_length: int) -> tuple[RopeConfig, int]:
    """The rotary positions, and the length up to which they are exact.

    ``rope_freqs`` is what a file has of llama3 scaling: its outcome for each frequency, which is all that is needed.

    Raises:
        InputError: A value is out of range, or what is scaled and how does not go together.
    """
    dim = reader.take("rope.dimension_count", int, 2, head_dim, default=head_dim)
    factor = reader.take("rope.scaling.factor", float, 0.0, default=reader.take("rope.scale_linear", float, 0.0, default=0.0))
    kind = reader.take_choice("rope.scaling.type", _KINDS, default="linear")
    reader.ignore("rope.scaling.finetuned")
    original = reader.take_size("rope.scaling.original_context_length", default=max_length)
    attention = reader.take("rope.scaling.attn_factor", float, default=1.0)
    rope = RopeConfig(
        theta=reader.take("rope.freq_base", float, default=10000.0),
        dim=None if dim == head_dim else dim,
        attention_factor=attention,
    )
    divisors, bound = _divisors(reader, rope.rotated(head_dim), original)
    if kind == "yarn":
        if divisors:
            raise InputError(f"{reader.place}: rope.scaling.type is 'yarn', and a tensor divides the frequencies too.", _HINT)
        return _yarn(reader, rope, factor, original), max_length
    if kind == "longrope" and not divisors:
        raise InputError(f"{reader.place}: rope.scaling.type is 'longrope', but the file lacks {_SHORT} and {_LONG}.", _HINT)
    scale = 1.0 if kind == "none" or not factor else factor
    if divisors and any(value * scale != 1 for value in divisors):
        rope = replace(rope, kind="longrope", factors=tuple(value * scale for value in divisors))
    elif scale != 1:
        rope = replace(rope, kind="linear", factor=scale)
    if bound < max_length:
        reader.warn(
            f"{reader.place}: longrope positions are exact up to {bound} tokens in a fixed graph, "
            f"so rows are bounded to that instead of {max_length}."
        )
    return rope, min(bound, max_length)


def _divisors(reader: GgufReader, dim: int, original: int) -> tuple[tuple[float, ...] | None, int]:
    """By what frequencies are divided, and up to which length."""
    short, long = reader.vector(_SHORT, dim // 2), reader.vector(_LONG, dim // 2)
    if (short is None) != (long is None):
        raise InputError(f"{reader.place}: the file has only one of {_SHORT} and {_LONG}.", "Get the file again.")
    plain = reader.vector(_DIVISORS, dim // 2)
    if short is None:
        return plain, 2**31
    if plain is not None:
        raise InputError(f"{reader.place}: the file has {_SHORT} and {_DIVISORS}; one of them divides the frequencies.", _HINT)
    return short, original if short != long else 2**31


def _yarn(reader: GgufReader, rope: RopeConfig, factor: float, original: int) -> RopeConfig:
    """YaRN (Peng et al. 2023); ``yarn_log_multiplier`` is what DeepSeek calls mscale_all_dim, with an mscale of 1."""
    if not factor:
        raise InputError(f"{reader.place} lacks rope.scaling.factor; expected a number above 0 for yarn.", _HINT)
    reader.require("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    weight = reader.take("rope.scaling.yarn_log_multiplier", float, 0.0, default=0.0)
    sharper = _sharper(factor, 1.0) / (_sharper(factor, weight) if weight else 1.0)
    return replace(
        rope, kind="yarn", factor=factor, original_max_length=original,
        attention_factor=rope.attention_factor * reader.take("rope.scaling.yarn_attn_factor", float, default=sharper),
        beta_fast=reader.take("rope.scaling.yarn_beta_fast", float, default=32.0),
        beta_slow=reader.take("rope.scaling.yarn_beta_slow", float, default=1.0),
    )  # fmt: skip


def _sharper(factor: float, weight: float) -> float:
    """By how much YaRN sharpens attention. Source: Peng et al. 2023, section 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
