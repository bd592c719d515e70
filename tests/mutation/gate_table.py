"""The mutants that the product's gate must catch: fault, model, graph, and the metrics that go red."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mutation import bundle_faults as b
from mutation import feature_faults as f
from mutation import graph_faults as g
from mutation.gate import ONE_MORE, WEIGHTS, GateMutant
from mutation.mutant import Metric

PREFILL = ("prefill, ragged batch", "max abs")
PREFILL_L2 = ("prefill, ragged batch", "relative L2, p95")
PREFILL_KL = ("prefill, ragged batch", "mean KL")
PREFILL_TOP1 = ("prefill, ragged batch", "same top-1")
PREFILL_CACHE = ("prefill caches", "max abs")
TOUCHED = ("prefill caches", "tensors touched past the prompt")
DECODE = ("decode, teacher-forced", "max abs")
DECODE_L2 = ("decode, teacher-forced", "relative L2, p95")
DECODE_CACHE = ("decode caches", "max abs")
STRAYED = ("decode caches", "slots changed beside the written one")
CHUNK = ("decode, several tokens at once", "max abs")
ALONE_PREFILL = ("each row alone", "prefill: max abs")
ALONE_DECODE = ("each row alone", "decode: max abs")
POISON = ("poisoned cache slots", "max abs")
GREEDY = ("greedy", "prompt 0: tokens agreed")
# Caches in half precision are compared relative to their largest value.
RELATIVE = {metric: (metric[0], "max abs, relative above 1") for metric in (PREFILL_CACHE, DECODE_CACHE)}


def put(
    edit: Callable[..., None], model: str, phase: str, *red: Metric, name: str | None = None, equivalent: str = ""
) -> GateMutant:
    """A mutant; its name is the fault's where none is given."""
    name = name or edit.__name__.replace("_", "-")
    return GateMutant(
        name, "gate", "gate", f"{model}/{phase}", red, equivalent=equivalent, edit=edit, model=model, phase=phase
    )  # fmt: skip


_QUERY = "blocks.1.attention.query.weight"
_FILES = [  # red by the exact comparison, however little the values show
    put(b.edit_tensor(_QUERY, b.negate_one), "llama", "files", WEIGHTS, PREFILL, DECODE, name="sign-of-one-weight"),
    put(b.edit_tensor(_QUERY, b.last_bit_of_one), "llama", "files", WEIGHTS, name="last-bit-of-one-weight"),
    put(b.edit_tensor(_QUERY, b.not_a_number), "llama", "files", WEIGHTS, PREFILL, DECODE, GREEDY, name="nan"),
    put(b.edit_tensor(_QUERY, lambda t: t.T), "llama", "files", WEIGHTS, PREFILL, DECODE, name="matrix-not-transposed"),
    put(
        b.edit_tensor("embedding.weight", lambda t: t.T.reshape(t.shape)), "gpt2", "files", WEIGHTS, PREFILL, name="head-transposed"
    ),
    put(b.edit_tensor("blocks.0.attention.out.bias", np.zeros_like), "gpt2", "files", WEIGHTS, PREFILL, DECODE, name="bias-zero"),
    put(b.edit_tensor("rope.frequencies", lambda t: t**1.4), "llama", "files", WEIGHTS, PREFILL, DECODE, GREEDY, name="rope-theta"),
    put(b.edit_tensor("window_rope.frequencies", lambda t: t[::-1]), "windows", "files", WEIGHTS, PREFILL, DECODE, name="window-rope"),
    put(b.edit_tensor("alibi.slopes", lambda t: t[::-1]), "alibi", "files", WEIGHTS, PREFILL, DECODE, name="slopes-reversed"),
    put(b.edit_tensor("head.bias", np.zeros_like), "parallel", "files", WEIGHTS, PREFILL, DECODE, name="head-bias-zero"),
    put(
        b.edit_tensor("blocks.1.attention.query_norm.weight", lambda t: t[::-1]), "parallel", "files", WEIGHTS, PREFILL, DECODE,
        name="heads-of-a-norm-reversed",
    ),
    put(b.two_layers_offsets_swapped, "llama", "files", WEIGHTS, PREFILL, DECODE),
    put(b.manifest_with(norm_eps=1e-3), "llama", "files", WEIGHTS, name="epsilon-in-the-manifest"),
    put(b.manifest_with(window=9), "windows", "files", WEIGHTS, name="window-in-the-manifest"),
]  # fmt: skip
_PREFILL = [
    put(g.causal_mask_dropped, "llama", "prefill", PREFILL, ALONE_PREFILL, ONE_MORE),
    put(g.causal_mask_dropped, "gpt2", "prefill", PREFILL, ALONE_PREFILL, ONE_MORE),
    put(g.rope_interleaved, "llama", "prefill", PREFILL, PREFILL_CACHE),
    put(g.rope_frequencies, "llama", "prefill", PREFILL, PREFILL_CACHE, ONE_MORE),
    put(g.rope_without_sine_sign, "llama", "prefill", PREFILL),
    # Rotary positions are relative: the keys alone show a shift that decode does not make too.
    put(g.prefill_positions_one_up, "llama", "prefill", PREFILL_CACHE, ONE_MORE),
    put(g.prefill_positions_one_up, "gpt2", "prefill", PREFILL, PREFILL_CACHE, ONE_MORE),
    put(g.prefill_written_one_slot_on, "llama", "prefill", PREFILL_CACHE, TOUCHED, DECODE),
    put(g.first_rows_keys_for_all, "gpt2", "prefill", PREFILL_CACHE, DECODE, ALONE_DECODE),
    put(g.key_value_swapped_in_cache, "llama", "prefill", PREFILL_CACHE, DECODE, ONE_MORE),
    put(g.key_value_swapped_in_attention, "gpt2", "prefill", PREFILL, ONE_MORE),
    put(g.heads_swapped, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.logit_positions_ignored, "llama", "prefill", PREFILL, ONE_MORE, GREEDY),
    put(g.logit_positions_one_back, "windows", "prefill", PREFILL, ONE_MORE, GREEDY),
    put(g.epsilon_100, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.epsilon_100, "gpt2", "prefill", PREFILL_L2, ONE_MORE),
    put(g.attention_scale, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.attention_softcap, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.gelu("none"), "gpt2", "prefill", PREFILL_L2, name="gelu-erf-for-tanh"),
    put(g.gelu("tanh"), "parallel", "prefill", PREFILL_L2, name="gelu-tanh-for-erf"),
    put(g.gelu("none"), "windows", "prefill", PREFILL_L2, name="gate-erf-for-tanh"),
    put(g.gate_and_up_swapped, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.residual_dropped, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.another_layers_weight, "gpt2", "prefill", PREFILL, ONE_MORE),
    put(g.another_layers_norm, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.bias_dropped, "gpt2", "prefill", PREFILL, ONE_MORE),
    put(g.bias_of_the_query_for_the_key, "gpt2", "prefill", PREFILL_CACHE),
    put(g.logits_scaled, "llama", "prefill", PREFILL_L2),
    put(g.heads_merged_along_the_wrong_axis, "llama", "prefill", PREFILL, ONE_MORE),
    put(g.keys_cached_along_the_wrong_axis, "gpt2", "prefill", PREFILL_CACHE, DECODE, ONE_MORE),
]
_DECODE = [
    put(g.written_one_slot_on, "llama", "decode", DECODE, DECODE_CACHE, STRAYED),
    put(g.written_one_slot_back, "llama", "decode", DECODE, DECODE_CACHE, STRAYED),
    put(g.written_where_the_first_row_ends, "gpt2", "decode", DECODE, DECODE_CACHE, STRAYED, ALONE_DECODE),
    put(g.mask_all_true, "llama", "decode", DECODE, POISON),
    put(g.mask_excludes_the_token_itself, "llama", "decode", DECODE, ONE_MORE),
    put(g.mask_one_slot_too_far, "llama", "decode", DECODE, POISON),
    put(g.mask_from_the_first_row, "gpt2", "decode", DECODE, ALONE_DECODE, POISON),
    put(g.mask_sees_the_whole_chunk, "llama", "decode", CHUNK),
    put(g.first_rows_length_for_all, "gpt2", "decode", DECODE, STRAYED, ALONE_DECODE),
    put(g.rotary_positions_one_up, "llama", "decode", DECODE, DECODE_CACHE, ONE_MORE),
    put(g.learned_positions_one_up, "gpt2", "decode", DECODE, DECODE_CACHE, ONE_MORE),
    put(g.positions_stand_still_in_a_chunk, "llama", "decode", CHUNK),
    put(g.positions_stand_still_in_a_chunk, "gpt2", "decode", CHUNK),
    put(g.logit_positions_ignored, "llama", "decode", CHUNK),
    put(g.logit_positions_one_back, "gpt2", "decode", CHUNK),
    put(g.heads_merged_along_the_wrong_axis, "gpt2", "decode", CHUNK),  # of one token there is nothing to turn
    put(g.stale_cache, "llama", "decode", DECODE, CHUNK, ONE_MORE),
    put(g.another_layers_cache_is_read, "llama", "decode", DECODE, ONE_MORE),
    put(g.another_layers_key_is_cached, "gpt2", "decode", DECODE, DECODE_CACHE),
    put(g.cache_rounded_to_half, "llama", "decode", DECODE_CACHE),
    put(g.key_value_swapped_in_cache, "llama", "decode", DECODE, DECODE_CACHE),
    put(g.rope_frequencies, "llama", "decode", DECODE, DECODE_CACHE, ONE_MORE),
    put(g.rope_interleaved, "llama", "decode", DECODE, DECODE_CACHE, ONE_MORE),
    put(g.epsilon_100, "llama", "decode", DECODE, ONE_MORE),
    put(g.attention_scale, "gpt2", "decode", DECODE, ONE_MORE),
    put(g.gelu("none"), "gpt2", "decode", DECODE_L2, name="gelu-erf-for-tanh"),
    put(g.bias_dropped, "gpt2", "decode", DECODE, ONE_MORE),
]
_WINDOWS = [
    put(f.window_by(1), "windows", "prefill", PREFILL, ONE_MORE, name="window-one-wider"),
    put(f.window_by(-1), "windows", "prefill", PREFILL, ONE_MORE, name="window-one-narrower"),
    put(f.window_by(1), "windows", "decode", DECODE, CHUNK, ONE_MORE, name="window-one-wider"),
    put(f.window_by(-1), "windows", "decode", DECODE, CHUNK, ONE_MORE, name="window-one-narrower"),
    put(f.window_dropped_in_a_layer, "windows", "prefill", PREFILL, ONE_MORE),
    put(f.window_dropped_in_a_layer, "windows", "decode", DECODE, ONE_MORE),
    put(f.window_in_a_full_layer, "windows", "prefill", PREFILL, ONE_MORE),
    put(f.window_in_a_full_layer, "windows", "decode", DECODE, ONE_MORE),
    put(f.window_one_layer_on, "windows", "decode", DECODE, ONE_MORE),
    put(f.window_without_causal, "windows", "prefill", PREFILL, ALONE_PREFILL),
    put(f.window_without_causal, "windows", "decode", DECODE, POISON),
    put(f.window_from_the_first_row, "windows", "decode", DECODE, ALONE_DECODE),
    put(f.rope_bases_swapped, "windows", "prefill", PREFILL, PREFILL_CACHE),
    put(f.rope_bases_swapped, "windows", "decode", DECODE, DECODE_CACHE, ONE_MORE),
    put(f.window_base_in_a_full_layer, "windows", "prefill", PREFILL, PREFILL_CACHE),
    put(f.softcap_constant, "windows", "prefill", PREFILL, ONE_MORE),
    put(f.softcap_dropped, "windows", "prefill", PREFILL, ONE_MORE),
    put(f.softcap_dropped, "windows", "decode", DECODE, ONE_MORE),
    put(f.softcap_after_the_mask, "windows", "prefill", PREFILL, ALONE_PREFILL),
    put(f.softcap_after_the_mask, "windows", "decode", DECODE, POISON),
    put(f.default_attention_scale, "windows", "prefill", PREFILL, ONE_MORE),
    put(f.logit_softcap_dropped, "windows", "prefill", PREFILL),
    put(f.logit_softcap_constant, "windows", "decode", DECODE),
    put(f.embedding_scale_dropped, "windows", "prefill", PREFILL, PREFILL_CACHE),
    put(f.embedding_scale_dropped, "windows", "decode", DECODE, ONE_MORE),
    put(f.embedding_scale_only_in_the_residual, "windows", "prefill", PREFILL_L2),
    put(f.norm_dropped("blocks.1.attention.query_norm"), "windows", "prefill", PREFILL, name="query-norm-dropped"),
    put(f.norm_dropped("blocks.2.attention.key_norm"), "windows", "decode", DECODE, DECODE_CACHE, name="key-norm-dropped"),
    put(
        f.norms_swapped("blocks.0.attention.query_norm", "blocks.0.attention.key_norm"), "windows", "prefill", PREFILL_CACHE,
        name="query-and-key-norm-swapped",
    ),
    put(f.query_norm_after_rotation, "windows", "prefill", PREFILL, ONE_MORE),
    put(f.norm_dropped("blocks.1.post_norm1"), "windows", "prefill", PREFILL, name="post-norm-dropped"),
    put(f.norm_dropped("blocks.3.post_norm2"), "windows", "decode", DECODE, name="post-norm-dropped"),
    put(f.norms_swapped("blocks.1.post_norm1", "blocks.1.post_norm2"), "windows", "prefill", PREFILL, name="post-norms-swapped"),
    put(f.norms_swapped("blocks.1.norm2", "blocks.1.post_norm1"), "windows", "decode", DECODE, name="pre-and-post-norm-swapped"),
    put(f.norm_after_the_residual, "windows", "prefill", PREFILL, ONE_MORE),
]  # fmt: skip
_PARALLEL = [
    put(f.parallel_read_in_sequence, "parallel", "prefill", PREFILL, ONE_MORE),
    put(f.parallel_read_in_sequence, "parallel", "decode", DECODE, ONE_MORE),
    put(f.parallel_read_through_one_norm, "parallel", "prefill", PREFILL, ONE_MORE),
    put(f.norms_swapped("blocks.0.norm1", "blocks.0.norm2"), "parallel", "decode", DECODE, DECODE_CACHE, name="norms-swapped"),
    put(f.feed_forward_dropped, "parallel", "decode", DECODE, ONE_MORE),
    put(f.residual_scale_dropped, "parallel", "prefill", PREFILL, PREFILL_CACHE),
    put(f.residual_scale_on_everything, "parallel", "decode", DECODE, DECODE_CACHE),
    put(f.logit_scale_dropped, "parallel", "prefill", PREFILL),
    put(f.logit_scale_dropped, "parallel", "decode", DECODE),
    put(f.head_bias_dropped, "parallel", "decode", DECODE, ONE_MORE),
    put(f.head_bias_after_the_scale, "parallel", "prefill", PREFILL, ONE_MORE),
    put(f.rotary_over_the_whole_head, "parallel", "prefill", PREFILL, PREFILL_CACHE),
    put(f.rotary_over_the_last_dims, "parallel", "prefill", PREFILL_CACHE),
    put(f.rotary_over_the_last_dims, "parallel", "decode", DECODE, DECODE_CACHE, ONE_MORE),
    put(g.rope_interleaved, "parallel", "decode", DECODE, DECODE_CACHE),
    put(f.nope_layer_rotated, "parallel", "prefill", PREFILL, PREFILL_CACHE),
    put(f.nope_layer_rotated, "parallel", "decode", DECODE, DECODE_CACHE),
    put(f.rotary_layer_left_unrotated, "parallel", "decode", DECODE, DECODE_CACHE),
    put(f.one_heads_norm_for_all, "parallel", "prefill", PREFILL, ONE_MORE),
    put(f.norm_dropped("blocks.2.attention.key_norm"), "parallel", "prefill", PREFILL_CACHE, name="weight-of-a-key-norm-dropped"),
]
_ALIBI = [
    put(f.alibi_slopes("Gather", [5, 4, 3, 2, 1, 0], axis=0), "alibi", "prefill", PREFILL, ONE_MORE, name="slopes-reversed"),
    put(f.alibi_slopes("Gather", [5, 4, 3, 2, 1, 0], axis=0), "alibi", "decode", DECODE, ONE_MORE, name="slopes-reversed"),
    put(f.alibi_slopes("Gather", [0] * 6, axis=0), "alibi", "prefill", PREFILL, ONE_MORE, name="one-heads-slope-for-all"),
    put(f.alibi_slopes("Neg"), "alibi", "prefill", PREFILL, ONE_MORE, name="slopes-negated"),
    put(f.alibi_slopes("Neg"), "alibi", "decode", DECODE, ONE_MORE, name="slopes-negated"),
    put(f.alibi_slopes("Mul", 12**-0.5), "alibi", "prefill", PREFILL, ONE_MORE, name="bias-before-the-scale"),
    put(f.alibi_slopes("Mul", 1.02), "alibi", "decode", DECODE, ONE_MORE, name="slopes-a-fiftieth-up"),
    put(f.alibi_slopes("Mul", 0.0), "alibi", "prefill", PREFILL, ONE_MORE, name="bias-dropped"),
    put(f.alibi_dropped_in_a_layer, "alibi", "decode", DECODE, ONE_MORE),
    put(f.alibi_lets_later_tokens_through, "alibi", "prefill", PREFILL, ALONE_PREFILL),
    put(f.alibi_lets_later_tokens_through, "alibi", "decode", DECODE, POISON),
    put(f.embedding_norm_dropped, "alibi", "prefill", PREFILL, ONE_MORE),
    put(g.mask_excludes_the_token_itself, "alibi", "decode", DECODE, ONE_MORE),
]
_HALF = [
    put(edit, model, phase, *(RELATIVE.get(metric, metric) for metric in red))
    for model in ("llama-fp16", "llama-bf16")
    for edit, phase, red in (
        (g.causal_mask_dropped, "prefill", (PREFILL, ALONE_PREFILL, ONE_MORE)),
        (g.rope_frequencies, "prefill", (PREFILL, PREFILL_CACHE, ONE_MORE)),
        (g.heads_swapped, "prefill", (PREFILL, PREFILL_KL, ONE_MORE)),
        (g.logit_positions_one_back, "prefill", (PREFILL, PREFILL_TOP1, ONE_MORE)),
        (g.key_value_swapped_in_cache, "decode", (DECODE, DECODE_CACHE)),
        (g.mask_one_slot_too_far, "decode", (DECODE, POISON)),
        (g.written_one_slot_back, "decode", (DECODE, DECODE_CACHE, STRAYED)),
        (g.positions_stand_still_in_a_chunk, "decode", (CHUNK,)),
    )
]
_HALF += [
    put(b.edit_tensor(_QUERY, b.last_bit_of_one), model, "files", WEIGHTS, name="last-bit-of-one-weight")
    for model in ("llama-fp16", "llama-bf16")
]
_EQUIVALENT = [
    put(
        g.residual_added_the_other_way_round, "llama", "prefill",
        equivalent="a + b is b + a, in floating point too",
    ),
    put(
        f.alibi_without_the_querys_position, "alibi", "decode",
        equivalent="slope × the query's position is the same for every key of a query; softmax takes it away",
    ),
    put(
        f.attention_written_out, "windows", "decode",
        equivalent="Attention as MatMul, Tanh, mask, Softmax, MatMul: the order of sums differs, nothing else",
    ),
]  # fmt: skip
GATE = [*_FILES, *_PREFILL, *_DECODE, *_WINDOWS, *_PARALLEL, *_ALIBI, *_HALF, *_EQUIVALENT]
