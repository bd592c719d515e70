"""The mutants that the comparison with transformers must catch: fault, checkpoint, and the metrics that go red."""

from __future__ import annotations

from dataclasses import replace

import torch

from mutation import shared_faults as s
from mutation.mutant import Metric
from mutation.oracle import ONE_PASS, SESSION, STEPS, Fault, OracleMutant
from tformer_deploy.backends.torch import TorchBackend, TorchCache
from tformer_deploy.checkpoints import rope, transforms, windows
from tformer_deploy.checkpoints.families import gemma2, gemma3, qwen2
from tformer_deploy.checkpoints.family import ACTIVATIONS
from tformer_deploy.checkpoints.transforms import SAME, TRANSPOSE, SplitQkv
from tformer_deploy.reference import layers, ops, positions


def put(name: str, case: str, fault: Fault, *red: Metric, equivalent: str = "") -> OracleMutant:
    """A mutant that one pass and steps both show where no metric is named."""
    named = red if red or equivalent else (ONE_PASS, STEPS)
    return OracleMutant(
        name, "oracle-test", "oracle", case.replace(" ", "-"), named, equivalent=equivalent, fault=fault, case=case
    )


_ROPE = [
    put("theta-of-another-family", "llama says no theta", s.entries(rope.read_rope.__kwdefaults__, theta=1e6)),
    put("theta-ignored", "llama theta", s.new_spelling_ignored("rope_theta")),
    put("theta-ignored", "llama old theta", s.rope_key_ignored("rope_theta")),
    put("theta-ignored", "neox old", s.rope_key_ignored("rope_theta")),
    put("factor-ignored", "llama linear", s.rope_kind_ignored("linear")),
    put("rope-scaling-ignored", "llama old linear", s.rope_kind_ignored("linear")),
    put("factor-ignored", "llama llama3", s.rope_kind_ignored("llama3")),
    put("factor-ignored", "llama yarn", s.rope_kind_ignored("yarn")),
    put("factors-ignored", "phi3 longrope", s.rope_kind_ignored("longrope")),
    put("factor-taken-from-the-start", "llama dynamic", s.entries(rope._READERS, dynamic=rope._READERS["linear"])),
    put("blend-dropped", "llama llama3", s.patched(positions, "_llama3", s.llama3_without_blend)),
    put("original-length-ignored", "llama llama3", s.rope_field("llama", original_max_length=8192)),
    put("original-length-ignored", "llama yarn", s.rope_field("llama", original_max_length=128)),
    put("attention-factor-dropped", "llama yarn", s.rope_field("llama", attention_factor=1.0)),
    put("attention-factor-on-angles-only", "llama yarn mscale", s.yarn_scale_without_weight()),
    put("truncate-ignored", "llama yarn untruncated", s.rope_field("llama", truncate=True)),
    put("betas-ignored", "llama yarn mscale", s.yarn_ramp(lambda found: replace(found, beta_fast=32.0, beta_slow=1.0))),
    put(
        "betas-swapped", "llama yarn",
        s.yarn_ramp(lambda found: replace(found, beta_fast=found.beta_slow, beta_slow=found.beta_fast)),
    ),
    put("ends-of-the-ramp-swapped", "llama yarn", s.yarn_sides_swapped()),
    put("long-factors-for-short", "phi3 longrope", s.long_factors_for_short()),
    put("attention-factor-dropped", "phi3 longrope", s.rope_field("phi3", attention_factor=1.0)),
    put("bound-dropped", "phi3 longrope", s.config("phi3", max_length=128)),
    put("share-ignored", "phi", s.patched(rope, "rotated_dims", lambda place, dim, share: None)),
    put("share-ignored", "neox old", s.rope_key_ignored("partial_rotary_factor")),
    put("last-dims-rotated", "neox", s.rotate_the_last_dims()),
    put("pairs-side-by-side", "llama", s.patched(ops, "rotate", s.rotate_interleaved)),
    put("turned-backwards", "llama", s.rotate_backwards()),
    put("bases-swapped", "gemma3", s.config("gemma3_text", lambda found: replace(found, rope=found.window_rope, window_rope=found.rope))),
    put("window-base-ignored", "gemma3", s.config("gemma3_text", window_rope=None)),
    put("scaling-of-full-layers-ignored", "gemma3", s.rope_kind_ignored("linear")),
    put("steps-one-position-on", "llama", s.rope_shifted(lambda where: where.shape[1] == 1), STEPS),
    put("layers-without-rotation-inverted", "smollm3", s.config("smollm3", lambda found: replace(found, nope_layers=(1, 2)))),
    put("no-layer-without-rotation", "smollm3 says no layers", s.config("smollm3", nope_layers=())),
]  # fmt: skip
_POSITIONS = [
    put("positions-from-one", "gpt2", s.loaded(lambda decoder: decoder.positions.weight.copy_(decoder.positions.weight.roll(-1, 0)))),
    put(
        "two-rows-not-skipped", "opt",
        s.patched(transforms.SkipRows, "place", lambda self, target, block, first: target.copy_(block[: len(target)])),
    ),
    put("slopes-as-for-powers-of-two", "bloom six heads", s.patched(positions, "alibi_slopes", s.alibi_as_for_powers_of_two)),
    put("bias-after-the-scale", "falcon alibi", s.config("falcon", alibi_scale=1.0)),
    put("bias-not-rounded", "falcon alibi", s.config("falcon", alibi_bf16=False)),
    put("bias-before-the-scale", "bloom", s.config("bloom", lambda found: replace(found, alibi_scale=found.head_dim**-0.5))),
]  # fmt: skip
_MASKS = [
    put("window-one-wider", "mistral", s.masks(lambda seen, q, k, window: seen(q, k, window and window + 1))),
    put("window-one-narrower", "gemma2", s.masks(lambda seen, q, k, window: seen(q, k, window and window - 1))),
    put("window-ignored", "mistral", s.config("mistral", window=None, window_layers=())),
    put("window-ignored", "starcoder2", s.masks(lambda seen, q, k, window: seen(q, k, None))),
    put("window-in-the-other-layers", "gemma2 says no layers", s.other_windows(gemma2)),
    put("window-in-the-other-layers", "gemma3 says no layers", s.other_windows(gemma3)),
    put("kinds-of-layers-swapped", "gemma3", s.entries(windows._KINDS, full_attention=True, sliding_attention=False)),
    put("window-from-a-layer-too-late", "qwen2 upper windows", s.upper_windows_late()),
    put("use-sliding-window-ignored", "qwen2 windows off", s.windows_always_on(qwen2)),
    put("window-in-rotated-layers", "smollm3", s.config("smollm3", window_layers=(1, 2))),
    put("window-dropped", "smollm3", s.config("smollm3", window=None, window_layers=())),
    put("steps-see-the-first-rows-length", "llama", s.masks(lambda seen, q, k, window: seen(q[:1].expand_as(q), k, window)), STEPS),
    put("a-token-does-not-see-itself", "bloom", s.masks(lambda seen, q, k, window: seen(q - 1, k, window) | (k == 0)[None, None, None])),
]  # fmt: skip
_SCALES = [
    put("scale-from-width", "qwen3", s.attention_scale(lambda found: (found.d_model / found.n_heads) ** -0.5)),
    put("scale-from-width", "gemma2", s.attention_scale(lambda found: found.head_dim**-0.5)),
    put("query-pre-attn-scalar-ignored", "gemma3", s.config("gemma3_text", attention_scale=None)),
    put("scale-attn-weights-ignored", "gpt2 unscaled", s.config("gpt2", attention_scale=None)),
    put("soft-caps-swapped", "gemma2", s.config("gemma2", attention_softcap=3.0, logit_softcap=5.0)),
    put("soft-cap-on-scores-dropped", "gemma2", s.config("gemma2", attention_softcap=None)),
    put("soft-cap-on-logits-dropped", "gemma2", s.config("gemma2", logit_softcap=None)),
    put("soft-cap-on-logits-dropped", "gemma3", s.config("gemma3_text", logit_softcap=None)),
    put("soft-cap-after-the-mask", "gemma2", s.patched(ops, "attend", s.attend_capped_after_the_mask)),
    put("embedding-scale-dropped", "gemma", s.config("gemma", embedding_scale=1.0)),
    put(
        "embedding-scale-in-half-precision", "gemma",
        s.config("gemma", lambda found: replace(found, embedding_scale=float(torch.tensor(found.embedding_scale).bfloat16()))),
    ),
    put("embedding-multiplier-dropped", "granite", s.config("granite", embedding_scale=1.0)),
    put("attention-multiplier-dropped", "granite", s.config("granite", attention_scale=None)),
    put("residual-multiplier-dropped", "granite", s.config("granite", residual_scale=1.0)),
    put("logits-scaling-dropped", "granite", s.config("granite", logit_scale=1.0)),
    put("logits-scaling-multiplies", "granite", s.config("granite", logit_scale=0.5)),
    put("logit-scale-dropped", "cohere", s.config("cohere", logit_scale=1.0)),
]  # fmt: skip
_NORMS = [
    put("epsilon-ignored", "llama eps", s.config("llama", norm_eps=1e-5)),
    put("epsilon-of-another-family", "llama", s.config("llama", norm_eps=1e-5)),
    put("epsilon-of-another-family", "gemma faint", s.config("gemma", norm_eps=1e-5)),
    put("epsilon-of-another-family", "gemma2 faint", s.config("gemma2", norm_eps=1e-5)),
    put("epsilon-of-another-family", "gemma3 faint", s.config("gemma3_text", norm_eps=1e-5)),
    put("epsilon-of-another-family", "olmo2", s.config("olmo2", norm_eps=1e-6)),
    put("epsilon-of-another-family", "opt", s.config("opt", norm_eps=1e-6)),
    put(
        "plus-one-dropped", "gemma",
        s.patched(transforms.PlusOne, "place", lambda self, target, block, first: target[first : first + len(block)].copy_(block)),
    ),
    put("plus-one-dropped-in-query-norms", "gemma3", s.transform("gemma3_text", "query_norm", lambda found: SAME)),
    put("not-centred", "neox", s.patched(layers.Norm, "forward", s.norm_not_centred)),
    put("head-norms-dropped", "cohere", s.patched(layers.Attention, "_heads", s.heads_without_norms)),
    put("head-norms-dropped", "stablelm norms", s.patched(layers.Attention, "_heads", s.heads_without_norms)),
    put("head-norms-dropped", "qwen3", s.patched(layers.Attention, "_heads", s.heads_without_norms)),
    put("head-norms-dropped", "phi norms", s.patched(layers.Attention, "_heads", s.heads_without_norms)),
    put("query-and-key-norm-swapped", "qwen3", s.exchanged("qwen3", "query_norm", "key_norm")),
    put("heads-of-the-norms-reversed", "stablelm norms", s.head_norms_reversed()),
    put("head-norms-not-turned", "cohere", s.transform("cohere", "query_norm", lambda found: SAME)),
    put("normed-head-by-head", "olmo2", s.patched(layers.Attention, "_heads", s.heads_normed_one_by_one)),
    put("norms-before-instead-of-after", "olmo2", s.patched(layers.Block, "forward", s.post_norms_before)),
    put("post-norms-swapped", "olmo2", s.exchanged("olmo2", "post_norm1", "post_norm2")),
    put("norm-after-attention-read-as-before", "gemma2", s.exchanged("gemma2", "post_norm1", "norm2")),
    put("norms-swapped", "falcon grouped", s.exchanged("falcon", "norm1", "norm2")),
    put("embedding-norm-dropped", "bloom", s.loaded(lambda decoder: setattr(decoder, "embedding_norm", None))),
    put("taken-for-sequential", "neox", s.config("gpt_neox", residual="sequential")),
    put("taken-for-parallel", "neox sequential", s.config("gpt_neox", residual="parallel")),
]  # fmt: skip
_ACTIVATIONS = [
    put("gelu-erf-for-tanh", "gpt2", s.entries(ACTIVATIONS, gelu_new="gelu")),
    put("gelu-tanh-for-erf", "neox", s.entries(ACTIVATIONS, gelu="gelu_tanh")),
    put("gelu-erf-for-tanh", "starcoder2", s.entries(ACTIVATIONS, gelu_pytorch_tanh="gelu")),
    put("gelu-erf-for-tanh", "gemma gelu", s.config("gemma", activation="gelu")),
    put("gelu-for-relu", "opt", s.config("opt", activation="gelu")),
]
_WEIGHTS = [
    put("pairs-left-side-by-side", "gptj", s.transform("gptj", "query", lambda found: TRANSPOSE)),
    put("pairs-left-side-by-side", "cohere", s.transform("cohere", "key", lambda found: TRANSPOSE)),
    put("all-queries-first", "neox", s.fused_by_kind("gpt_neox")),
    put("all-queries-first", "bloom", s.fused_by_kind("bloom")),
    put("all-queries-first", "bigcode heads", s.fused_by_kind("gpt_bigcode")),
    put("all-queries-first", "falcon heads", s.fused_by_kind("falcon")),
    put("all-queries-first", "falcon grouped", s.fused_by_kind("falcon")),
    put("key-and-value-swapped", "bigcode", s.exchanged("gpt_bigcode", "key", "value")),
    put("key-and-value-swapped", "falcon", s.exchanged("falcon", "key", "value")),
    put("query-and-key-swapped", "gpt2", s.transform("gpt2", "query", lambda found: SplitQkv(1))),
    put("square-weight-transposed", "gpt2", s.transform("gpt2", "attention.out", lambda found: TRANSPOSE)),
    put("square-weight-not-transposed", "llama", s.transform("llama", "attention.out", lambda found: SAME)),
    put("gate-and-up-swapped", "phi3", s.exchanged("phi3", "gate", "up")),
    put("key-and-value-swapped", "phi3", s.exchanged("phi3", "key", "value")),
    put("key-value-heads-tiled", "llama six heads", s.attend_tiled()),
    put("head-taken-from-the-embedding", "llama", s.patched(layers.Head, "_product", lambda self, x, table, training: x @ table.T)),
    put("head-bias-dropped", "phi", s.zeroed("head.bias")),
    put("head-bias-dropped", "gptj", s.zeroed("head.bias")),
    put("query-biases-dropped", "qwen2", s.zeroed("query.bias")),
    put("value-biases-dropped", "qwen2", s.zeroed("value.bias")),
    put("inner-biases-dropped", "starcoder2", s.zeroed("up.bias")),
]  # fmt: skip
_CACHES = [
    put("logits-one-position-back", "llama", s.logits_one_position_back(), STEPS),
    put("cache-not-written-in-steps", "llama", s.cache_not_written_in_a_step(), STEPS),
    put("logits-of-the-padding", "llama", s.padded_to_the_end(), SESSION),
    put("slots-not-zeroed", "gpt2", s.slots_not_zeroed(), SESSION),
    put("caches-not-kept", "gpt2", s.patched(TorchBackend, "_store", lambda self, outputs, cache: outputs[0].numpy(force=True)), SESSION),
    put("rows-out-of-order-when-dropped", "gpt2", s.resized(lambda rows, capacity: (rows[::-1], capacity)), SESSION),
    put("a-chunk-counted-as-one-token", "gpt2", s.chunks_counted_as_one(), SESSION),
    put("refilled-row-is-the-first", "gpt2", s.patched(TorchCache, "rows", lambda self, start, stop: TorchCache([t[: stop - start] for t in self.tensors])), SESSION),
]  # fmt: skip
_EQUIVALENT = [
    put(
        "key-biases-dropped", "gpt2", s.zeroed("key.bias"),
        equivalent="without rotation a key's bias adds the same to every score of a query; softmax takes it away",
    ),
    put(
        "rotary-positions-from-one", "llama", s.rope_shifted(lambda where: True),
        equivalent="rotation shows distances only; prefill and steps are shifted alike",
    ),
]  # fmt: skip
ORACLE = [*_ROPE, *_POSITIONS, *_MASKS, *_SCALES, *_NORMS, *_ACTIVATIONS, *_WEIGHTS, *_CACHES, *_EQUIVALENT]
