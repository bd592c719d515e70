"""Ways to put a fault into code that runs, and the faulty code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mutation.oracle import Fault
from tformer_deploy.backends import session
from tformer_deploy.backends.torch import TorchBackend, TorchCache
from tformer_deploy.checkpoints import rope, windows
from tformer_deploy.checkpoints.families import FAMILIES, qwen2
from tformer_deploy.checkpoints.family import Source, Table
from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.checkpoints.transforms import IntoRow, Rows
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.reference import Decoder, layers, ops, positions

# --- Ways in -----------------------------------------------------------------------------------------------------------


def patched(target: Any, name: str, value: object) -> Fault:
    """A function, method or attribute is another one."""
    return lambda: mock.patch.object(target, name, value)


def entries(mapping: dict[str, Any], **values: object) -> Fault:
    """Entries of a table are others."""
    return lambda: mock.patch.dict(mapping, values)


def config(family: str, change: Callable[[ModelConfig], ModelConfig] | None = None, **fields: object) -> Fault:
    """The family's config is read wrongly: these fields, or what ``change`` makes of it."""
    right = FAMILIES[family]

    def read(reader: ConfigReader) -> ModelConfig:
        found = right.read_config(reader)
        return replace(found, **fields) if change is None else change(found)

    return lambda: mock.patch.dict(FAMILIES, {family: replace(right, read_config=read)})


def rope_field(family: str, **fields: object) -> Fault:
    """The family's rotary positions are read wrongly."""

    def change(found: ModelConfig) -> ModelConfig:
        assert found.rope is not None
        return replace(found, rope=replace(found.rope, **fields))

    return config(family, change)


def table(family: str, change: Callable[[Table, ModelConfig], Table]) -> Fault:
    """The family's tensors are taken from elsewhere, or turned otherwise."""
    right = FAMILIES[family]
    return lambda: mock.patch.dict(FAMILIES, {family: replace(right, table=lambda found: change(right.table(found), found))})


def transform(family: str, part: str, value: Callable[[ModelConfig], object]) -> Fault:
    """Weights of every module of that name are turned otherwise (``.`` and its name; biases stay)."""

    def change(found: Table, model: ModelConfig) -> Table:
        wrong = {n: replace(s, transform=value(model)) for n, s in _weights(found, part).items()}
        assert wrong
        return found | wrong

    return table(family, change)


def exchanged(family: str, a: str, b: str) -> Fault:
    """Two modules of every layer have each other's tensors."""

    def change(found: Table, model: ModelConfig) -> Table:
        pairs = {n: n.replace(f".{a}.", f".{b}.") for n in found if f".{a}." in n}
        assert pairs
        return found | {n: found[m] for n, m in pairs.items()} | {m: found[n] for n, m in pairs.items()}

    return table(family, change)


def loaded(change: Callable[[Decoder], object]) -> Fault:
    """Something is forgotten or changed once the weights are there."""
    right = Decoder.from_pretrained.__func__

    def load(cls: type[Decoder], *args: Any) -> Decoder:
        decoder: Decoder = right(cls, *args)
        with torch.no_grad():
            change(decoder)
        return decoder

    return patched(Decoder, "from_pretrained", classmethod(load))


def zeroed(*parts: str) -> Fault:
    """Parameters whose names end so are left out."""

    def change(decoder: Decoder) -> None:
        names = [p for n, p in decoder.named_parameters() if n.endswith(parts)]
        assert names
        for parameter in names:
            parameter.zero_()

    return loaded(change)


def both(*faults: Fault) -> Fault:
    """Several at once."""

    @contextmanager
    def entered() -> Iterator[None]:
        with faults[0]():
            if len(faults) == 1:
                yield
            else:
                with both(*faults[1:])():
                    yield

    return entered


def fused_by_kind(family: str) -> Fault:
    """A fused tensor that holds query, key and value head by head is read as all queries, all keys, all values."""

    def change(found: Table, model: ModelConfig) -> Table:
        query, key = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
        parts = {"query": (0, query), "key": (query, key), "value": (query + key, key)}
        result = dict(found)
        for name, source in found.items():
            module = name.split(".")[-2]
            if module in parts and isinstance(source, Source):
                result[name] = replace(source, transform=Rows(query + 2 * key, *parts[module]))
        return result

    return table(family, change)


def head_norms_reversed() -> Fault:
    """StableLM's norms of single heads fill the rows from the last one on."""

    def change(found: Table, model: ModelConfig) -> Table:
        several = {n: s for n, s in found.items() if isinstance(s, tuple)}
        assert several
        return found | {
            n: tuple(replace(s, transform=IntoRow(len(parts) - 1 - row)) for row, s in enumerate(parts))
            for n, parts in several.items()
        }

    return table("stablelm", change)


def _weights(found: Table, part: str) -> dict[str, Source]:
    return {n: s for n, s in found.items() if f".{part}.weight" in f".{n}" and isinstance(s, Source)}


# --- Rotary positions ----------------------------------------------------------------------------------------------------


def rope_kind_ignored(kind: str) -> Fault:
    def ignoring(outer: ConfigReader, reader: ConfigReader, plain: RopeConfig, dim: int) -> tuple[RopeConfig, int | None]:
        reader.ignore(*reader.data)
        return plain, None

    return entries(rope._READERS, **{kind: ignoring})


def rope_key_ignored(key: str) -> Fault:
    """Wherever it is spelled."""
    right = rope._rope

    def read(outer: ConfigReader, reader: ConfigReader, *rest: Any) -> tuple[RopeConfig, int]:
        reader.data.pop(key, None)
        return right(outer, reader, *rest)

    return patched(rope, "_rope", read)


def new_spelling_ignored(key: str) -> Fault:
    """In ``rope_scaling`` and ``rope_parameters``."""
    right = rope._spelled
    return patched(rope, "_spelled", lambda data, place: {k: v for k, v in right(data, place).items() if k != key})


def long_factors_for_short() -> Fault:
    right = rope._divisors

    def read(reader: ConfigReader, key: str, wanted: int) -> tuple[float, ...]:
        right(reader, key, wanted)
        return right(reader, "long_factor", wanted)

    return patched(rope, "_divisors", read)


def yarn_scale_without_weight() -> Fault:
    right = rope._yarn_scale
    return patched(rope, "_yarn_scale", lambda factor, weight: right(factor, 1.0))


def yarn_ramp(change: Callable[[RopeConfig], RopeConfig]) -> Fault:
    right = positions._yarn_ramp
    return patched(positions, "_yarn_ramp", lambda found, dim: right(change(found), dim))


def yarn_sides_swapped() -> Fault:
    right = positions._yarn_ramp
    return patched(positions, "_yarn_ramp", lambda found, dim: 1 - right(found, dim))


def llama3_without_blend(found: RopeConfig, frequencies: Tensor) -> Tensor:
    longest = found.original_max_length / found.low_freq_factor
    return torch.where(2 * torch.pi / frequencies > longest, frequencies / found.factor, frequencies)


def rope_shifted(when: Callable[[Tensor], bool]) -> Fault:
    """Positions [B, S] are one too large where ``when`` says so."""
    right = positions.Rope.forward
    return patched(positions.Rope, "forward", lambda self, where, dtype: right(self, where + 1 if when(where) else where, dtype))


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dim = 2 * cos.shape[-1]
    first, second = x[..., 0:dim:2], x[..., 1:dim:2]
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((turned, x[..., dim:]), -1)


def rotate_backwards() -> Fault:
    right = ops.rotate
    return patched(ops, "rotate", lambda x, cos, sin: right(x, cos, -sin))


def rotate_the_last_dims() -> Fault:
    right = ops.rotate

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rest = x.shape[-1] - 2 * cos.shape[-1]
        return torch.cat((x[..., :rest], right(x[..., rest:].contiguous(), cos, sin)), -1)

    return patched(ops, "rotate", turn)


# --- ALiBi, masks, attention -------------------------------------------------------------------------------------------------


def alibi_as_for_powers_of_two(found: ModelConfig) -> Tensor:
    return 2 ** (-8 * torch.arange(1, found.n_heads + 1) / found.n_heads)


def masks(change: Callable[[Any, Tensor, Tensor, int | None], Tensor]) -> Fault:
    """What a query may see is ``change(right, queries, keys, window)``."""
    from tformer_deploy.reference import decoder

    right = decoder.seen
    return patched(decoder, "seen", lambda queries, keys, window: change(right, queries, keys, window))


def attend_tiled() -> Fault:
    """Key/value head j serves query heads j, j + K, …"""
    right = ops.attend

    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        return right(query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), *rest)

    return patched(ops, "attend", attend)


def attend_capped_after_the_mask(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * scale
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    return (softcap * torch.tanh(scores / softcap)).softmax(-1) @ value


def attention_scale(change: Callable[[ModelConfig], float]) -> Fault:
    right = layers.Attention.__init__

    def make(self: layers.Attention, found: ModelConfig, layer: int) -> None:
        right(self, found, layer)
        self.scale = change(found)

    return patched(layers.Attention, "__init__", make)


def cache_not_written_in_a_step() -> Fault:
    right = ops.tensor_scatter
    return patched(ops, "tensor_scatter", lambda cache, new, at: cache.clone() if new.shape[2] == 1 else right(cache, new, at))


def other_windows(module: Any) -> Fault:
    """The family's rule gives a window to the layers that have none, and the other way round."""

    def read(reader: ConfigReader, n_layers: int, pattern: Callable[[int], bool], **more: Any) -> windows.Windows:
        return windows.read_windows(reader, n_layers, lambda layer: not pattern(layer), **more)

    return patched(module, "read_windows", read)


def windows_always_on(module: Any) -> Fault:
    """The key that switches windows off is not looked at."""

    def read(reader: ConfigReader, n_layers: int, pattern: Callable[[int], bool], **more: Any) -> windows.Windows:
        return windows.read_windows(reader, n_layers, pattern, **(more | {"enabled": True}))

    return patched(module, "read_windows", read)


def upper_windows_late() -> Fault:
    """Windows begin one layer after ``max_window_layers``."""

    def read(reader: ConfigReader, n_layers: int, pattern: Callable[[int], bool], **more: Any) -> windows.Windows:
        return windows.read_windows(reader, n_layers, lambda layer: pattern(layer - 1), **more)

    return patched(qwen2, "read_windows", read)


# --- Norms, blocks, the head ----------------------------------------------------------------------------------------------------


def heads_without_norms(self: layers.Attention, x: Tensor, norm: object) -> Tensor:
    return x.reshape(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)


def heads_normed_one_by_one(self: layers.Attention, x: Tensor, norm: layers.Norm | None) -> Tensor:
    """A norm over the width becomes one over each head."""
    x = x.reshape(*x.shape[:2], -1, self.config.head_dim)
    if norm is not None:
        x = F.rms_norm(x, x.shape[-1:], None, norm.eps) * norm.weight.view(-1, self.config.head_dim)
    return x.transpose(1, 2)


def post_norms_before(self: layers.Block, x: Tensor, step: layers.Step, cache: Any) -> tuple[Tensor, Any]:
    """The norms after attention and feed-forward are read as norms before them."""
    assert self.post_norm1 is not None
    assert self.post_norm2 is not None
    y, cache = self.attention(self.post_norm1(x), step, cache)
    x = x + y
    return x + self.feed_forward(self.post_norm2(x)), cache


def norm_not_centred(self: layers.Norm, x: Tensor) -> Tensor:
    y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
    return y if self.bias is None else y + self.bias


def logits_one_position_back() -> Fault:
    right = Decoder._logits
    return patched(Decoder, "_logits", lambda self, x, at: right(self, x, (at - 1).clamp(min=0)))


# --- Sessions ---------------------------------------------------------------------------------------------------------------


def padded_to_the_end() -> Fault:
    """Logits are those of the last column, padding or not."""
    right = session._padded

    def pad(rows: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        ids, at = right(rows)
        return ids, np.full_like(at, ids.shape[1] - 1)

    return patched(session, "_padded", pad)


def slots_not_zeroed() -> Fault:
    """Caches hold whatever was in memory, such as what is not a number."""
    right = TorchBackend.allocate

    def allocate(self: TorchBackend, batch: int, capacity: int) -> TorchCache:
        return TorchCache([torch.full_like(t, torch.nan) for t in right(self, batch, capacity).tensors])

    return patched(TorchBackend, "allocate", allocate)


def resized(change: Callable[[list[int], int], tuple[list[int], int]]) -> Fault:
    """Rows are copied to a new cache as ``change`` says."""
    right = TorchCache.resize
    return patched(TorchCache, "resize", lambda self, rows, capacity: right(self, *change(list(rows), capacity)))


def chunks_counted_as_one() -> Fault:
    """A row of several new tokens is one longer afterwards."""
    right = session.Session.extend

    def extend(self: session.Session, rows: Sequence[Sequence[int]]) -> Any:
        before = list(self._lengths)
        logits = right(self, rows)
        self._lengths = [n + 1 for n in before]
        return logits

    return patched(session.Session, "extend", extend)
