"""Reads a foreign ``config.json``: every key is taken, required, ignored by name, or refused."""

from __future__ import annotations

import math
from typing import Any

from tformer_deploy.errors import InputError, escaped

LONGEST = 1 << 24  # tokens; a config that claims more is taken for damaged unless --max-length says how many are wanted
_MISSING = object()
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", list: "a list"}

# Keys that say nothing about the forward pass at inference: bookkeeping, training, and generation settings of old configs.
HARMLESS = frozenset(
    {
        "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range",
        "name_or_path", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
        "decoder_start_token_id", "tokenizer_class", "finetuning_task", "output_attentions", "output_hidden_states",
        "output_scores", "return_dict", "return_dict_in_generate", "use_return_dict", "torchscript", "use_bfloat16",
        "tf_legacy_loss", "gradient_checkpointing", "attention_dropout", "problem_type", "id2label", "label2id",
        "num_labels", "_num_labels",
        "task_specific_params", "is_decoder", "is_llama_config", "tie_encoder_decoder", "_commit_hash",
        "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
        "chunk_size_feed_forward", "unsloth_version", "unsloth_fixed", "transformers.js_config", "max_length",
        "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
        "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "prefix",
    }
)  # fmt: skip

# Keys of features that no family has; a value other than null, false, 0 or empty refuses the checkpoint in one sentence.
FEATURES = {
    "auto_map": "code of its own (auto_map), which is never executed",
    "custom_pipelines": "code of its own (custom_pipelines), which is never executed",
    "custom_ops_library": "code of its own (custom_ops_library), which is never executed",
    "trust_remote_code": "code of its own (trust_remote_code), which is never executed",
    "vision_config": "a vision tower (vision_config)",
    "audio_config": "an audio tower (audio_config)",
    "num_local_experts": "a mixture of experts (num_local_experts)",
    "num_experts": "a mixture of experts (num_experts)",
    "n_routed_experts": "a mixture of experts (n_routed_experts)",
    "num_experts_per_tok": "a mixture of experts (num_experts_per_tok)",
    "moe_intermediate_size": "a mixture of experts (moe_intermediate_size)",
    "kv_lora_rank": "multi-head latent attention (kv_lora_rank)",
    "q_lora_rank": "multi-head latent attention (q_lora_rank)",
    "add_cross_attention": "cross-attention (add_cross_attention)",
    "cross_attention_hidden_size": "cross-attention (cross_attention_hidden_size)",
    "cross_attention_layers": "cross-attention (cross_attention_layers)",
    "is_encoder_decoder": "an encoder (is_encoder_decoder)",
    "pruned_heads": "pruned heads (pruned_heads)",
}


class ConfigReader:
    """Hands out the values of one JSON object and remembers which were read.

    Args:
        data: The object.
        place: How messages call it, such as ``config.json``.
        max_length: Stands in where the config bounds no length (``--max-length``), or None.
    """

    def __init__(self, data: dict[str, Any], place: str, max_length: int | None = None) -> None:
        self.data, self.place, self.max_length = data, place, max_length
        self.warnings: list[str] = []
        self._read: set[str] = set()

    def warn(self, text: str) -> None:
        """Notes what is odd, or bounded, but not refused."""
        self.warnings.append(text)

    def take(self, key: str, kind: type, low: float | None = None, high: float | None = None, default: Any = _MISSING) -> Any:
        """The value of ``key``, of exactly this kind (``int``, ``float``, ``bool``, ``str``, ``list``, ``dict``) and range.

        null counts as absent.

        Raises:
            InputError: It is missing without a default, of another type, or out of range.
        """
        self._read.add(key)
        value = self.data.get(key)
        if value is None:
            if default is _MISSING:
                raise InputError(f"{self.place} lacks {key}; expected {_range(kind, low, high)}.", f"Add {key} to {self.place}.")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or not _inside(value, low, high):
            raise InputError(f"{self.place}: {key} is {_shown(self.data[key])}; expected {_range(kind, low, high)}.")
        return value

    def take_size(self, key: str, default: Any = _MISSING) -> Any:
        """A whole number from 1 to 2147483647 (a size of the model).

        Raises:
            InputError: As :meth:`take`.
        """
        return self.take(key, int, 1, 2**31 - 1, default)

    def take_choice(self, key: str, choices: dict[str, Any], default: str) -> Any:
        """What ``choices`` holds for the string of ``key``.

        Raises:
            InputError: It is not among the choices.
        """
        value = self.take(key, str, default=default)
        if value not in choices:
            raise InputError(f"{self.place}: {key} is {_shown(value)}; supported are {', '.join(choices)}.")
        return choices[value]

    def take_length(self, key: str) -> int:
        """The checkpoint's own bound on the tokens of a row; ``--max-length`` stands in where it has none that is believable.

        Raises:
            InputError: There is none, and no ``--max-length``.
        """
        value = self.take(key, int, 1, default=None)
        if value is None or value > LONGEST:
            if self.max_length is not None:
                return self.max_length
            found = f"lacks {key}" if value is None else f"has {key} {_shown(value)}, above {LONGEST}"
            raise InputError(f"{self.place} {found}, so nothing bounds the length of a row.", "Give --max-length.")
        return int(value)

    def require(self, key: str, *values: Any) -> None:
        """``key`` is absent, null or one of ``values``: anything else changes what the model computes.

        Raises:
            InputError: It is something else.
        """
        self._read.add(key)
        value = self.data.get(key)
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            expected = " or ".join(_shown(v) for v in values) or "null"
            raise InputError(f"{self.place}: {key} is {_shown(value)}; only {expected} is supported.")

    def ignore(self, *keys: str) -> None:
        """These keys change nothing at inference."""
        self._read.update(keys)

    def refuse_features(self) -> None:
        """Refuses what no family has, by name.

        Raises:
            InputError: A key of :data:`FEATURES` or ``quantization_config`` holds something.
        """
        for key in ("quantization_config", "compression_config"):
            if self.data.get(key):
                method = self.data[key].get("quant_method", "unknown") if isinstance(self.data[key], dict) else self.data[key]
                raise InputError(
                    f"{self.place}: {key} says that the weights are quantised ({escaped(str(method))}), which is not supported.",
                    "Use the unquantised checkpoint, or a GGUF file of the model.",
                )
        for key, feature in FEATURES.items():
            value = self.data.get(key)
            if value:
                raise InputError(f"{self.place}: the model has {feature}, which is not supported.", "Use a model without it.")
            if not value:
                self._read.add(key)
        self.ignore("quantization_config", "compression_config")

    def finish(self) -> None:
        """Every key has been read, is null, or is in :data:`HARMLESS`.

        Raises:
            InputError: Others are left; all are listed.
        """
        unread = sorted(key for key in set(self.data) - self._read - HARMLESS if self.data[key] is not None)
        if unread:
            listed = ", ".join(f"{escaped(key)} = {_shown(self.data[key])}" for key in unread)
            raise InputError(
                f"{self.place} has keys that nothing here reads, so the model could mean something else: {listed}.",
                "Remove a key only if you know that it changes nothing.",
            )


def head_dim(place: str, width: tuple[str, int], heads: tuple[str, int]) -> int:
    """Width of a head where the config does not give one.

    Raises:
        InputError: The heads do not divide the width; both numbers are named.
    """
    if width[1] % heads[1]:
        raise InputError(f"{place}: {width[0]} is {width[1]} and {heads[0]} {heads[1]}; the second must divide the first.")
    return width[1] // heads[1]


def _inside(value: Any, low: float | None, high: float | None) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def _range(kind: type, low: float | None, high: float | None) -> str:
    word = _WORDS.get(kind, "an object")
    if low is not None and high is not None:
        return f"{word} from {low} to {high}"
    return word if low is None else f"{word} of at least {low}"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = escaped(repr(value))
    return text if len(text) <= 80 else f"{text[:80]}…"
