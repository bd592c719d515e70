"""The model in our own words: frozen dataclasses that every other part reads."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tformer_deploy.errors import InputError

Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
Positions = Literal["learned", "rotary", "alibi"]
RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
Residual = Literal["sequential", "parallel", "parallel_shared"]
QkNorm = Literal["none", "head", "each_head", "width"]
DType = Literal["fp32", "fp16", "bf16"]

DTYPES: tuple[DType, ...] = get_args(DType)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: pairs are (i, i + dim/2) ("halves").

    Attributes:
        theta: Base of the frequencies.
        kind: How the frequencies are scaled: ``default`` (not at all), ``linear``, ``llama3``, ``yarn`` or ``longrope``.
        factor: linear, llama3, yarn: how far long wavelengths are stretched (> 0).
        low_freq_factor: llama3 only.
        high_freq_factor: llama3 only, above ``low_freq_factor``.
        original_max_length: llama3 and yarn, tokens the model was first trained on.
        dim: Rotated dims of each head, the first ones; all where None.
        beta_fast: yarn only, rotations over the original length above which a frequency stays as it is.
        beta_slow: yarn only, rotations below which a frequency is divided by ``factor``.
        truncate: yarn only, whether the bounds between the two are whole numbers.
        attention_factor: Cosines and sines are multiplied by it (yarn, longrope).
        factors: longrope only, by what each frequency is divided, dim/2 numbers.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    dim: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeKind):
            raise InputError(f"rope.kind is {self.kind!r}; expected one of {', '.join(get_args(RopeKind))}.")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _positive(f"rope.{name}", getattr(self, name))
        for i, value in enumerate(self.factors):
            _positive(f"rope.factors[{i}]", value)
        _at_least_one("rope.original_max_length", self.original_max_length)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise InputError(
                f"rope.high_freq_factor is {self.high_freq_factor} and rope.low_freq_factor {self.low_freq_factor}; "
                "the high one must be above the low one."
            )
        if self.kind == "yarn" and self.theta == 1:
            raise InputError("rope.theta is 1; yarn needs another base.")

    def rotated(self, head_dim: int) -> int:
        """How many dims of a head of ``head_dim`` are rotated."""
        return head_dim if self.dim is None else self.dim

    def check(self, name: str, head_dim: int) -> None:
        """Refuses what does not fit a head.

        Raises:
            InputError: The rotated dims are odd or more than the head has, or ``factors`` are not one a frequency.
        """
        rotated = self.rotated(head_dim)
        if rotated % 2 or not 2 <= rotated <= head_dim:
            raise InputError(f"{name} rotates {rotated} of {head_dim} dims of a head; expected an even number up to {head_dim}.")
        wanted = rotated // 2 if self.kind == "longrope" else 0
        if len(self.factors) != wanted:
            raise InputError(f"{name} has {len(self.factors)} factors; expected {wanted}, one a frequency of longrope.")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        vocab_size: Rows of the embedding (V).
        d_model: Width.
        n_layers: Blocks (L).
        n_heads: Query heads (H).
        n_kv_heads: Key/value heads (K); kv head j serves query heads j*H/K … (j+1)*H/K - 1.
        head_dim: Width of a head (D); need not be d_model / n_heads.
        d_ff: Inner width of the feed-forward.
        max_length: Tokens that a row may hold in all, prompt and completion.
        norm: ``layernorm`` (weight, and bias if ``norm_bias``) or ``rmsnorm`` (weight).
        norm_eps: Added to the variance.
        norm_bias: Whether a LayerNorm has a bias.
        pre_norm: Norms before attention and feed-forward.
        post_norm: Norms on what attention and feed-forward return, before the residual is added.
        qk_norm: Norm on queries and keys before rotation: ``head`` (over D, one weight for all heads), ``each_head`` (over D, a
            weight for each head, never a bias), ``width`` (over all heads together) or ``none``.
        residual: ``sequential``; ``parallel`` (attention and feed-forward both read the block's input, each through its own
            norm) or ``parallel_shared`` (through one norm).
        residual_scale: What attention and feed-forward return is multiplied by it.
        activation: ``gelu`` (erf), ``gelu_tanh``, ``silu`` or ``relu``.
        gated: True: down(act(gate(x)) * up(x)), SwiGLU with silu; False: down(act(up(x))).
        positions: ``learned`` table of ``max_length`` rows, ``rotary`` or ``alibi``.
        rope: Set exactly when positions is ``rotary``.
        window: Tokens that a layer of ``window_layers`` sees, itself included.
        window_layers: Indices of the layers that see a window only.
        window_rope: Rotary positions of ``window_layers`` where they are not ``rope``.
        nope_layers: Indices of layers without rotary positions.
        alibi_scale: The ALiBi bias is multiplied by it.
        alibi_bf16: Slopes, positions and their product are rounded to bfloat16, as the model was trained.
        attention_scale: Scores are multiplied by it; 1/sqrt(D) where None.
        attention_softcap: Scores become cap * tanh(score / cap), before masking.
        embedding_scale: Embeddings are multiplied by it.
        embedding_norm: A norm right after the embedding.
        logit_scale: Logits are multiplied by it.
        logit_softcap: Logits then become cap * tanh(logit / cap).
        qkv_bias: Bias on the query, key and value projections.
        out_bias: Bias on the attention's output projection.
        mlp_bias: Bias on the feed-forward projections.
        head_bias: Bias on the logits.
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
    norm_bias: bool = True
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: QkNorm = "none"
    residual: Residual = "sequential"
    residual_scale: float = 1.0
    activation: Activation = "silu"
    gated: bool = True
    positions: Positions = "rotary"
    rope: RopeConfig | None = None
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    nope_layers: tuple[int, ...] = ()
    alibi_scale: float = 1.0
    alibi_bf16: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_length"):
            _at_least_one(name, getattr(self, name))
        for name, kinds in _CHOICES.items():
            if getattr(self, name) not in get_args(kinds):
                raise InputError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(get_args(kinds))}.")
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"n_heads is {self.n_heads} and n_kv_heads {self.n_kv_heads}; the second must divide the first.")
        for name in ("norm_eps", "residual_scale", "alibi_scale", "embedding_scale", "logit_scale"):
            _positive(name, getattr(self, name))
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        self._check_positions()
        if not (self.pre_norm or self.post_norm):
            raise InputError("pre_norm and post_norm are both false; a block needs one.")
        if self.residual != "sequential" and (self.post_norm or not self.pre_norm):
            raise InputError(f"residual is {self.residual!r}, which goes with norms before attention and feed-forward only.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}; expected 0 ≤ dropout < 1.")

    def _check_positions(self) -> None:
        if (self.positions == "rotary") != (self.rope is not None):
            raise InputError(f"positions is {self.positions!r} and rope is {self.rope!r}; rope goes with rotary positions only.")
        if self.window_rope is not None and (self.rope is None or not self.window_layers):
            raise InputError("window_rope is set; it goes with rotary positions and window_layers.")
        if (self.window is not None) != bool(self.window_layers):
            raise InputError(f"window is {self.window} and window_layers {list(self.window_layers)}; they go together.")
        if self.window is not None:
            _at_least_one("window", self.window)
        if self.nope_layers and self.rope is None:
            raise InputError(f"nope_layers is {list(self.nope_layers)}; it goes with rotary positions.")
        for name in ("window_layers", "nope_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)) or any(not 0 <= i < self.n_layers for i in layers):
                raise InputError(f"{name} is {list(layers)}; expected rising indices below {self.n_layers}, the layers.")
        for name, rope in (("rope", self.rope), ("window_rope", self.window_rope)):
            if rope is not None:
                rope.check(name, self.head_dim)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``config.json`` of our own checkpoints and the manifest hold them.

        What stands at a default that came later than the first bundles is left out, so that a plain model reads the same
        in every version.
        """
        values = dataclasses.asdict(self)
        return _plain(self, values, _LATER) | {
            name: _plain(rope, values[name], _LATER_ROPE)
            for name, rope in (("rope", self.rope), ("window_rope", self.window_rope))
            if rope is not None
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """The inverse of :meth:`to_dict`; strict about names and types.

        Raises:
            InputError: A field is unknown, missing or has the wrong type.
        """
        values = _checked(cls, data, "config")
        for name in ("rope", "window_rope"):
            if values.get(name) is not None:
                values[name] = RopeConfig(**_checked(RopeConfig, values[name], f"config.{name}"))
        return cls(**values)


_CHOICES: dict[str, Any] = {
    "norm": Norm, "activation": Activation, "positions": Positions, "residual": Residual, "qk_norm": QkNorm,
}  # fmt: skip
_LATER = {
    "norm_bias", "pre_norm", "post_norm", "qk_norm", "residual", "residual_scale", "window", "window_layers", "window_rope",
    "nope_layers", "alibi_scale", "alibi_bf16", "attention_scale", "attention_softcap", "embedding_scale", "embedding_norm",
    "logit_scale", "logit_softcap", "head_bias",
}  # fmt: skip
_LATER_ROPE = {"dim", "beta_fast", "beta_slow", "truncate", "attention_factor", "factors"}


def _plain(config: ModelConfig | RopeConfig, values: dict[str, Any], later: set[str]) -> dict[str, Any]:
    """Without those of ``later`` that are at their defaults; tuples as the lists that JSON has."""
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    kept = {name: value for name, value in values.items() if name not in later or getattr(config, name) != defaults[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float,), "bool": (bool,), "int | None": (int, type(None)), "float | None": (float, type(None)),
}  # fmt: skip
_LISTS: dict[str, type] = {"tuple[int, ...]": int, "tuple[float, ...]": float}


def _checked(cls: type, data: Any, place: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(f"{place} is {type(data).__name__}; expected an object.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in data]
    if unknown or missing:
        raise InputError(f"{place}: unknown fields {unknown}, missing fields {missing}.")
    return {name: _value(str(fields[name].type), value, f"{place}.{name}") for name, value in data.items()}


def _value(annotation: str, value: Any, place: str) -> Any:
    """``value`` as the field of that annotation holds it; a nested object is left to its own class."""
    if annotation in _LISTS:
        if not isinstance(value, (list, tuple)):
            raise InputError(f"{place} is {value!r}; expected a list.")
        return tuple(_value(_LISTS[annotation].__name__, item, f"{place}[{i}]") for i, item in enumerate(value))
    wanted = _TYPES.get(annotation)
    if wanted is None:
        if annotation != "RopeConfig | None" and not isinstance(value, str):
            raise InputError(f"{place} is {value!r}; expected a string.")
        return value
    if float in wanted and type(value) is int:
        value = float(value)
    if type(value) not in wanted:
        raise InputError(f"{place} is {value!r}; expected {annotation.replace('None', 'null')}.")
    return value


def _positive(name: str, value: Any) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} is {value!r}; expected a finite number above 0.")


def _at_least_one(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value < 2**31:
        raise InputError(f"{name} is {value!r}; expected a whole number from 1 to 2147483647.")
