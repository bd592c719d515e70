"""What a family is: one table. And the accounting that no tensor is missing, left over, mis-shaped or of a strange dtype."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.checkpoints.tensor_file import Entry, TensorFile
from tformer_deploy.checkpoints.transforms import SAME, TRANSPOSE, Transform
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.parameters import parameter_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLOATS = ("fp32", "fp16", "bf16")
# What transformers calls an activation → what we do; its three tanh forms are one formula.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_SHOWN = 20  # names listed of each kind of problem
BLOCK_BYTES = 8 << 20  # read at a time


@dataclass(frozen=True)
class Source:
    """Where one of our parameters comes from: the stored name (without the family's prefix) and how it is turned."""

    name: str
    transform: Transform = SAME


Table = dict[str, Source | tuple[Source, ...]]  # several: each fills a part
_PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down", "head")


def expand(config: ModelConfig, names: Mapping[str, str | Source]) -> Table:
    """A table from our module names to stored ones, with ``{i}`` where the layer's number goes.

    ``weight`` and ``bias`` follow by themselves. Projections are stored [out, in] and transposed; a :class:`Source` says
    another transform, for both.
    """
    table: Table = {}
    for ours, theirs in names.items():
        source = theirs if isinstance(theirs, Source) else None
        stored = source.name if source else str(theirs)
        weight = source.transform if source else TRANSPOSE if ours.rpartition(".")[2] in _PROJECTIONS else SAME
        bias = source.transform if source else SAME
        for layer in range(config.n_layers) if "{i}" in ours else (None,):
            name, place = ((text if layer is None else text.replace("{i}", str(layer))) for text in (ours, stored))
            table[f"{name}.weight"] = Source(f"{place}.weight", weight)
            table[f"{name}.bias"] = Source(f"{place}.bias", bias)
    return table


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
        name: The ``model_type``.
        read_config: Takes every key that matters.
        table: Our parameter name → source, for every parameter of the model.
        architectures: Classes that ``architectures`` may name.
        prefix: Stored names may all carry it, or none.
        dropped: Stored names (without the prefix) of buffers that the model recomputes.
        head: Stored name of the output head, which a tied model may also ship if it equals the embedding.
    """

    name: str
    read_config: Callable[[ConfigReader], ModelConfig]
    table: Callable[[ModelConfig], Table]
    architectures: tuple[str, ...] = ()
    prefix: str = ""
    dropped: tuple[re.Pattern[str], ...] = ()
    head: str | None = None


class Located(NamedTuple):
    """A stored tensor: its file, its name there, and how it becomes ours."""

    file: TensorFile
    stored: str
    transform: Transform = SAME

    @property
    def entry(self) -> Entry:
        """Shape and dtype as stored."""
        return self.file.entries[self.stored]

    def block_rows(self) -> int:
        """Rows of the first axis to read at a time; a vector is read whole."""
        shape = self.entry.shape
        if len(shape) < 2:
            return max(1, *shape)
        width = 4
        for size in shape[1:]:
            width *= size
        return max(1, BLOCK_BYTES // max(1, width))


@dataclass
class _Problems:
    """Everything wrong with a checkpoint's tensors, by kind."""

    kinds: dict[str, list[str]] = field(default_factory=dict)
    hints: list[str] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        self.kinds.setdefault(kind, []).append(text)

    def finish(self, place: str) -> None:
        if not self.kinds:
            return
        parts = []
        for kind, texts in self.kinds.items():
            more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            parts.append(f"{len(texts)} {kind}: {', '.join(texts[:_SHOWN])}{more}")
        raise InputError(f"{place}: the tensors do not fit the config. {'; '.join(parts)}.", " ".join(self.hints) or _HINT)


_HINT = "Check that config and weights belong together and are complete."


def locate(family: Family, config: ModelConfig, files: Sequence[TensorFile], place: str) -> dict[str, tuple[Located, ...]]:
    """Every parameter of ``Decoder(config)``, in its order, with the stored tensors that fill it (one, as a rule).

    Raises:
        InputError: Tensors are missing, unused, mis-shaped, of an unsupported dtype, or stored twice: all listed at once.
    """
    problems = _Problems()
    stored = _canonical(family, files, problems)
    if config.n_layers > len(stored):  # before anything as long as the config claims is made
        raise InputError(
            f"{place}: the config has {config.n_layers} layers, the weights hold {len(stored)} tensors in all.", _HINT
        )
    table = family.table(config)
    result: dict[str, tuple[Located, ...]] = {}
    used: set[str] = set()
    for name, shape in parameter_shapes(config).items():
        wanted = table[name]
        parts = []
        for source in wanted if isinstance(wanted, tuple) else (wanted,):
            used.add(source.name)
            found = stored.get(source.name)
            if found is None:
                _missing(family, config, source.name, problems, _prefix(family, stored))
                continue
            parts.append(found._replace(transform=source.transform))
            _check_entry(parts[-1], source.transform.stored_shape(shape), problems)
        result[name] = tuple(parts)
    for name, found in stored.items():
        if name not in used and not _is_dropped(family, config, name):
            problems.add("unused", f"{escaped(found.stored)} (in {escaped(found.file.path.name)})")
    problems.finish(place)
    if config.tied and family.head in stored:
        _require_same_head(stored[family.head], result["embedding.weight"][0], place)
    return result


def _canonical(family: Family, files: Sequence[TensorFile], problems: _Problems) -> dict[str, Located]:
    result: dict[str, Located] = {}
    for file in files:
        for stored in file.entries:
            name = stored.removeprefix(family.prefix)
            if name in result:
                other = result[name]
                problems.add(
                    "stored twice", f"{escaped(other.stored)} ({other.file.path.name}) and {escaped(stored)} ({file.path.name})"
                )
            result[name] = Located(file, stored)
    return result


def _prefix(family: Family, stored: Mapping[str, Located]) -> str:
    """The family's prefix where this checkpoint's names carry it."""
    return family.prefix if any(found.stored.startswith(family.prefix) for found in stored.values()) else ""


def _missing(family: Family, config: ModelConfig, name: str, problems: _Problems, prefix: str) -> None:
    full = escaped(name if name == family.head else prefix + name)
    if full not in problems.kinds.get("missing", ()):  # a fused tensor fills several of ours
        problems.add("missing", full)
    if name == family.head and not config.tied:
        problems.hints.append(
            f"Add {name} to the weights, or set tie_word_embeddings to true in config.json if the head is the embedding."
        )


def _check_entry(found: Located, expected: tuple[int, ...], problems: _Problems) -> None:
    place = f"{escaped(found.stored)} (in {escaped(found.file.path.name)})"
    if any(place in text for texts in problems.kinds.values() for text in texts):
        return
    if found.entry.shape != expected:
        problems.add("mis-shaped", f"{place} has {list(found.entry.shape)}, expected {list(expected)}")
    if found.entry.dtype not in FLOATS:
        problems.add("of an unsupported dtype", f"{place} is {found.entry.dtype}, expected F32, F16 or BF16")


def _is_dropped(family: Family, config: ModelConfig, name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in family.dropped) or (config.tied and name == family.head)


def _require_same_head(head: Located, embedding: Located, place: str) -> None:
    """A tied model's extra head must be the embedding, value for value (compared in float32, block by block)."""
    import torch  # a damaged checkpoint is refused before anything as large is loaded

    same = head.entry.shape == embedding.entry.shape and head.entry.dtype in FLOATS
    rows = head.entry.shape[0] if same else 0
    step = head.block_rows()
    for first in range(0, rows, step):
        count = min(step, rows - first)
        one, other = (located.file.rows(located.stored, first, count).float() for located in (head, embedding))
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):  # NaN is refused where it is read, by its own name
            same = False
            break
    if not same:
        raise InputError(
            f"{place}: tie_word_embeddings is true, yet {escaped(head.stored)} differs from {escaped(embedding.stored)}.",
            f"Set tie_word_embeddings to false if the head is meant, or remove {escaped(head.stored)}.",
        )
