"""The model in our own words: frozen dataclasses that every other part reads."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tformer_deploy.errors import InputError

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "silu"]
Positions = Literal["learned", "rotary"]
RopeKind = Literal["default", "llama3"]
DType = Literal["fp32", "fp16", "bf16"]

DTYPES: tuple[DType, ...] = get_args(DType)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: pairs are (i, i + head_dim/2) ("halves").

    Attributes:
        theta: Base of the frequencies.
        kind: ``default``, or ``llama3`` (the four fields below are then needed).
        factor: llama3 only, how far long wavelengths are stretched (> 0).
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only, above ``low_freq_factor``.
        original_max_length: llama3 only, tokens the model was first trained on.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise InputError(f"rope.kind is {self.kind!r}; expected one of {', '.join(get_args(RopeKind))}.")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"rope.{name} is {value!r}; expected a finite number above 0.")
        _at_least_one("rope.original_max_length", self.original_max_length)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                f"rope.high_freq_factor is {self.high_freq_factor} and rope.low_freq_factor {self.low_freq_factor}; "
                "the high one must be above the low one."
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with pre-norm blocks.

    Attributes:
        vocab_size: Rows of the embedding (V).
        d_model: Width.
        n_layers: Blocks (L).
        n_heads: Query heads (H).
        n_kv_heads: Key/value heads (K); kv head j serves query heads j*H/K … (j+1)*H/K - 1.
        head_dim: Width of a head (D); need not be d_model / n_heads.
        d_ff: Inner width of the feed-forward.
        max_length: Tokens that a row may hold in all, prompt and completion.
        norm: ``layernorm`` (weight and bias) or ``rmsnorm`` (weight).
        norm_eps: Added to the variance.
        activation: ``gelu`` (erf), ``gelu_tanh`` or ``silu``.
        gated: True: down(act(gate(x)) * up(x)), SwiGLU with silu; False: down(act(up(x))).
        positions: ``learned`` table of ``max_length`` rows, or ``rotary``.
        rope: Set exactly when positions is ``rotary``.
        qkv_bias: Bias on the query, key and value projections.
        out_bias: Bias on the attention's output projection.
        mlp_bias: Bias on the feed-forward projections.
        tied: The head is the embedding.
        dropout: Probability in training; nothing at inference.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    max_length: int
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True
    positions: Positions = "rotary"
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_length"):
            _at_least_one(name, getattr(self, name))
        for name, kinds in (("norm", Norm), ("activation", Activation), ("positions", Positions)):
            if getattr(self, name) not in get_args(kinds):
                raise InputError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(get_args(kinds))}.")
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_heads is {self.n_heads} and n_kv_heads {self.n_kv_heads}; the second must divide the first.")
        if (self.positions == "rotary") != (self.rope is not None):
            raise InputError(f"positions is {self.positions!r} and rope is {self.rope!r}; rope goes with rotary positions only.")
        if self.positions == "rotary" and self.head_dim % 2:
            raise InputError(f"head_dim is {self.head_dim}; rotary positions need an even number.")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise InputError(f"norm_eps is {self.norm_eps!r}; expected a finite number above 0.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}; expected 0 ≤ dropout < 1.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``config.json`` of our own checkpoints and the manifest hold them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`; strict about names and types.

        Raises:
            InputError: A field is unknown, missing or has the wrong type.
        """
        values = _checked(cls, data, "config")
        if values.get("rope") is not None:
            values["rope"] = RopeConfig(**_checked(RopeConfig, values["rope"], "config.rope"))
        return cls(**values)


_PLAIN = {"int": int, "float": float, "bool": bool}


def _checked(cls: type, data: Any, place: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(f"{place} is {type(data).__name__}; expected an object.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in data]
    if unknown or missing:
        raise InputError(f"{place}: unknown fields {unknown}, missing fields {missing}.")
    values = dict(data)
    for name, value in data.items():
        want = _PLAIN.get(str(fields[name].type))
        if want is float and type(value) is int:
            values[name] = float(value)
        elif want is not None and type(value) is not want:
            raise InputError(f"{place}.{name} is {value!r}; expected {want.__name__}.")
        elif want is None and name != "rope" and not isinstance(value, str):
            raise InputError(f"{place}.{name} is {value!r}; expected a string.")
    return values


def _at_least_one(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value < 2**31:
        raise InputError(f"{name} is {value!r}; expected a whole number from 1 to 2147483647.")
