"""Rotary positions of a config, in the old spelling (``rope_theta``, ``rope_scaling``), the new (``rope_parameters``), or both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.config import RopeConfig
from tformer_deploy.errors import InputError

_KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")} | {"su": "longrope"}
_ORIGINAL = "original_max_position_embeddings"


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    max_length: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    theta_key: str = "rope_theta",
    partial_key: str = "partial_rotary_factor",
) -> tuple[RopeConfig, int]:
    """The rotary positions, and the length up to which they are exact.

    Args:
        reader: The config.
        head_dim: Width of a head.
        max_length: Tokens that a row may hold by the config.
        theta: The family's base where the config has none.
        partial: The family's rotated share of a head where the config has none; None: it always rotates all of it.
        theta_key: The family's old name of the base.
        partial_key: The family's old name of the share.

    Raises:
        InputError: The spellings contradict one another, a value is out of range, or the kind is not supported.
    """
    values: dict[str, Any] = {}
    for key, name in ((theta_key, "rope_theta"), (partial_key, "partial_rotary_factor"), (_ORIGINAL, _ORIGINAL)):
        value = reader.take(key, float, default=None)
        if value is not None:
            values[name] = value
    given = [key for key in ("rope_scaling", "rope_parameters") if reader.data.get(key) is not None]
    for key in given:
        _merge(values, _spelled(reader.take(key, dict), f"{reader.place}: {key}"), key, reader)
    reader.ignore("rope_scaling", "rope_parameters")
    inner = ConfigReader(values, f"{reader.place}: {' and '.join(given) or 'rope'}")
    return _rope(reader, inner, head_dim, max_length, theta, partial)


def read_ropes_by_layer(
    reader: ConfigReader, head_dim: int, max_length: int, *, theta: float, window_theta: float
) -> tuple[RopeConfig, RopeConfig, int]:
    """Rotary positions of full and of windowed layers (``rope_theta`` and ``rope_local_base_freq``, or one object each in
    ``rope_parameters``; ``rope_scaling`` is that of full layers), and the length up to which both are exact.

    Raises:
        InputError: As :func:`read_rope`.
    """
    new = reader.take("rope_parameters", dict, default={})
    unknown = sorted(set(new) - {"full_attention", "sliding_attention"})
    if unknown:
        raise InputError(f"{reader.place}: rope_parameters has {unknown[0]!r}; expected full_attention and sliding_attention.")
    result, length = [], max_length
    for kind, key, base, scaling in (
        ("full_attention", "rope_theta", theta, "rope_scaling"),
        ("sliding_attention", "rope_local_base_freq", window_theta, None),
    ):
        values: dict[str, Any] = {}
        if (value := reader.take(key, float, default=None)) is not None:
            values["rope_theta"] = value
        if scaling and (old := reader.take(scaling, dict, default=None)) is not None:
            _merge(values, _spelled(old, f"{reader.place}: {scaling}"), scaling, reader)
        inner = ConfigReader(new, f"{reader.place}: rope_parameters")
        nested = _spelled(inner.take(kind, dict, default={}), f"{inner.place}.{kind}")
        _merge(values, nested, f"rope_parameters.{kind}", reader)
        rope, bound = _rope(reader, ConfigReader(values, f"{inner.place}.{kind}"), head_dim, max_length, base, None)
        result.append(rope)
        length = min(length, bound)
    return result[0], result[1], length


def rotated_dims(place: str, head_dim: int, share: float) -> int | None:
    """How many dims of a head are rotated, None for all.

    Raises:
        InputError: The number is odd or none.
    """
    dims = int(head_dim * share)
    if dims % 2 or not 2 <= dims <= head_dim:
        raise InputError(
            f"{place}: partial_rotary_factor {share:g} of head_dim {head_dim} rotates {dims} dims; "
            f"expected an even number from 2 to {head_dim}."
        )
    return None if dims == head_dim else dims


def _merge(values: dict[str, Any], more: dict[str, Any], key: str, reader: ConfigReader) -> None:
    for name, value in more.items():
        if name in values and values[name] != value:
            raise InputError(
                f"{reader.place}: {name} is {values[name]!r} in one place and {value!r} in {key}.",
                "Keep the one that the model was trained with.",
            )
        values[name] = value


def _spelled(data: dict[str, Any], place: str) -> dict[str, Any]:
    """One spelling in the words of the other: ``type`` is ``rope_type``; null counts as absent."""
    values = {name: float(value) if type(value) is int else value for name, value in data.items() if value is not None}
    old = values.pop("type", None)
    if old is not None and values.setdefault("rope_type", old) != old:
        raise InputError(f"{place} has type {old!r} and rope_type {values['rope_type']!r}.", "Keep the right one.")
    return values


def _rope(
    outer: ConfigReader, reader: ConfigReader, head_dim: int, max_length: int, theta: float, partial: float | None
) -> tuple[RopeConfig, int]:
    kind = reader.take_choice("rope_type", _KINDS, default="default")
    if partial is None:
        reader.require("partial_rotary_factor", 1.0)
    share = reader.take("partial_rotary_factor", float, 0.0, 1.0, default=partial or 1.0)
    plain = RopeConfig(theta=reader.take("rope_theta", float, default=theta), dim=rotated_dims(reader.place, head_dim, share))
    rope, bound = _READERS[kind](outer, reader, plain, head_dim)
    reader.finish()
    if bound is not None and bound < max_length:
        outer.warn(
            f"{reader.place}: {kind} positions are exact up to {bound} tokens in a fixed graph, "
            f"so rows are bounded to that instead of {max_length}."
        )
        max_length = bound
    return rope, max_length


def _default(outer: ConfigReader, reader: ConfigReader, rope: RopeConfig, head_dim: int) -> tuple[RopeConfig, int | None]:
    reader.ignore("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)  # left over from other kinds
    return rope, None


def _linear(outer: ConfigReader, reader: ConfigReader, rope: RopeConfig, head_dim: int) -> tuple[RopeConfig, int | None]:
    reader.ignore(_ORIGINAL)
    return replace(rope, kind="linear", factor=_factor(reader)), None


def _dynamic(outer: ConfigReader, reader: ConfigReader, rope: RopeConfig, head_dim: int) -> tuple[RopeConfig, int | None]:
    """The base grows with the row once it is longer than the config's length; up to there nothing changes."""
    reader.ignore(_ORIGINAL)
    _factor(reader)
    return rope, int(outer.take_size("max_position_embeddings"))


def _llama3(outer: ConfigReader, reader: ConfigReader, rope: RopeConfig, head_dim: int) -> tuple[RopeConfig, int | None]:
    factor, low, high = (reader.take(key, float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return replace(
        rope, kind="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_length=_original(reader)
    ), None  # fmt: skip


def _yarn(outer: ConfigReader, reader: ConfigReader, rope: RopeConfig, head_dim: int) -> tuple[RopeConfig, int | None]:
    factor, original = _factor(reader), _original(reader)
    scale, all_dims = reader.take("mscale", float, default=0.0), reader.take("mscale_all_dim", float, default=0.0)
    attention = reader.take("attention_factor", float, default=None)
    if attention is None:
        attention = _yarn_scale(factor, scale) / _yarn_scale(factor, all_dims) if scale and all_dims else _yarn_scale(factor, 1.0)
    return replace(
        rope, kind="yarn", factor=factor, original_max_length=original, attention_factor=attention,
        beta_fast=reader.take("beta_fast", float, default=0.0) or 32.0, beta_slow=reader.take("beta_slow", float, default=0.0) or 1.0,
        truncate=reader.take("truncate", bool, default=True),
    ), None  # fmt: skip


def _yarn_scale(factor: float, weight: float) -> float:
    """By how much YaRN sharpens attention. Source: Peng et al. 2023, section 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(outer: ConfigReader, reader: ConfigReader, rope: RopeConfig, head_dim: int) -> tuple[RopeConfig, int | None]:
    """Rows longer than the original length use other divisors from their first token on, which a cache cannot follow."""
    original, wanted = _original(reader), rope.rotated(head_dim) // 2
    short, _ = (_divisors(reader, key, wanted) for key in ("short_factor", "long_factor"))
    factor = reader.take("factor", float, default=outer.take_size("max_position_embeddings") / original)
    attention = reader.take("attention_factor", float, default=None)
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(rope, kind="longrope", factors=short, attention_factor=attention), original


def _divisors(reader: ConfigReader, key: str, wanted: int) -> tuple[float, ...]:
    values = reader.take(key, list)
    if len(values) != wanted or any(type(v) not in (int, float) or not math.isfinite(v) or v <= 0 for v in values):
        raise InputError(f"{reader.place}: {key} has {len(values)} items; expected {wanted} numbers above 0, one a rotated pair.")
    return tuple(float(v) for v in values)


def _factor(reader: ConfigReader) -> float:
    value: float = reader.take("factor", float)
    if value <= 0:
        raise InputError(f"{reader.place}: factor is {value:g}; expected a number above 0.")
    return value


def _original(reader: ConfigReader) -> int:
    value = reader.take(_ORIGINAL, float, 1, 2**31 - 1)
    if not value.is_integer():
        raise InputError(f"{reader.place}: {_ORIGINAL} is {value}; expected a whole number.")
    return int(value)


_READERS: dict[str, Callable[[ConfigReader, ConfigReader, RopeConfig, int], tuple[RopeConfig, int | None]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
