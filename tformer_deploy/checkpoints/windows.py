"""Sliding windows of a config: how many tokens, and in which layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.checkpoints.reader import ConfigReader

_KINDS = {"full_attention": False, "sliding_attention": True}


class Windows(NamedTuple):
    """As ``ModelConfig`` holds them."""

    window: int | None
    window_layers: tuple[int, ...]


def read_windows(
    reader: ConfigReader, n_layers: int, pattern: Callable[[int], bool], default: int | None = None, enabled: bool = True
) -> Windows:
    """``sliding_window`` and ``layer_types``.

    Args:
        reader: The config.
        n_layers: Layers.
        pattern: Which layers have a window where ``layer_types`` does not say.
        default: The family's window where the config lacks the key (null is none).
        enabled: False where another key switches windows off.

    Raises:
        InputError: The window is below 1, or ``layer_types`` does not fit.
    """
    size = reader.take("sliding_window", int, 1, 2**31 - 1, default=None)
    if size is None and "sliding_window" not in reader.data:
        size = default
    kinds = reader.take("layer_types", list, default=None)
    if kinds is None:
        windowed = [enabled and size is not None and pattern(layer) for layer in range(n_layers)]
    else:
        windowed = _kinds(reader, kinds, n_layers)
        if any(windowed) and (size is None or not enabled):
            raise InputError(
                f"{reader.place}: layer_types has sliding_attention, yet sliding_window is not set.", "Add sliding_window."
            )
    layers = tuple(layer for layer, sliding in enumerate(windowed) if sliding)
    return Windows(size if layers else None, layers)


def _kinds(reader: ConfigReader, kinds: list[object], n_layers: int) -> list[bool]:
    if len(kinds) != n_layers:
        raise InputError(f"{reader.place}: layer_types has {len(kinds)} items; expected {n_layers}, one a layer.")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InputError(f"{reader.place}: layer_types has {escaped(repr(kind))}; supported are {', '.join(_KINDS)}.")
    return [_KINDS[str(kind)] for kind in kinds]
