"""GGUF files: the same numbers as the Hugging Face folder, damaged ones refused, tokenizers equal to the originals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_checkpoints_families import LLAMA3, hot_model
from tokenizers import Tokenizer

from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.config import RopeConfig
from tformer_deploy.errors import InputError, TformerError
from tformer_deploy.reference import Decoder
from tformer_deploy.reference.positions import rope_frequencies

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
Keys = Callable[[gguf.GGUFWriter], None]


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query and key as llama.cpp's converter stores them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: torch.nn.Module, kind: str = "F32", keys: Keys | None = None, **tensors: np.ndarray | None
) -> Path:
    """The model as llama.cpp's converter would write it; ``tensors`` adds, replaces or (None) leaves out."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if keys is not None:
        keys(writer)
    stored: dict[str, np.ndarray | None] = {}
    for name, parameter in model.named_parameters():
        data = parameter.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            data = permuted(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if name not in OUTER:
            _, _, layer, inner = name.split(".", 3)
            part, ending = inner.rsplit(".", 1)
            name = f"blk.{layer}.{NAMES[part]}.{ending}"
        stored[OUTER.get(name, name)] = data
    for name, data in (stored | {name.replace("__", "."): data for name, data in tensors.items()}).items():
        if data is None:
            continue
        quantised = gguf.GGMLQuantizationType[kind if data.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(data), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 131, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return ids, model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


CASES: dict[str, dict[str, object]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "head width": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "without grouping": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_when_a_gguf_is_opened_then_equal_transformers(case: str, tmp_path: Path):
    model = hot_model("llama", **CASES[case])
    path = write_gguf(tmp_path / "model.gguf", model)
    ids, expected = logits_of(model)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.format, checkpoint.family, checkpoint.name) == ("gguf", "llama", "model")
    with torch.no_grad():
        assert float((Decoder.from_pretrained(path)(ids) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_tensors_when_quantised_then_are_the_dequantised_values(kind: str, tmp_path: Path):
    model = hot_model("llama", intermediate_size=160)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, kind))
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    quantised = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[kind])
    expected = torch.from_numpy(gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])).T
    assert torch.equal(checkpoint.read("blocks.1.feed_forward.down.weight", torch.float32), expected)
    assert checkpoint.tensors["blocks.1.feed_forward.down.weight"].dtype == {"F16": "fp16", "BF16": "bf16"}.get(kind, "fp32")


def test_rope_when_the_file_has_llama3_divisors_then_frequencies_equal_transformers(tmp_path: Path):
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 10000.0, "factor": 32.0}
    model = hot_model("llama", rope_parameters=scaling, max_position_embeddings=16384)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.max() > 1.01
    config = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, rope_freqs__weight=divisors)).config
    assert config.max_length == 16384
    assert torch.allclose(rope_frequencies(config.rope, 16), model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    ones = open_checkpoint(write_gguf(tmp_path / "ones.gguf", model, rope_freqs__weight=np.ones(8, np.float32))).config.rope
    assert ones == RopeConfig()
    with pytest.raises(InputError, match=r"rope_freqs\.weight is fp32 \[7\]; expected fp32 \[8\]"):
        open_checkpoint(write_gguf(tmp_path / "other.gguf", model, rope_freqs__weight=divisors[1:]))


REFUSED: dict[str, tuple[Keys, str]] = {
    "experts": (lambda w: w.add_expert_count(8), "mixture of experts"),
    "yarn without a factor": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"lacks rope\.scaling\.factor"),
    "scaling": (
        lambda w: w.add_string("llama.rope.scaling.type", "ntk"),
        r"rope\.scaling\.type is 'ntk'; supported are none, linear",
    ),
    "longrope without divisors": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        r"longrope', but the file lacks rope_factors_short",
    ),
    "another strength of yarn": (
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            w.add_rope_scaling_factor(4.0),
            w.add_rope_scaling_yarn_ext_factor(0.5),
        ),
        r"rope\.scaling\.yarn_ext_factor is 0\.5",
    ),
    "no tokens before it": (lambda w: w.add_causal_attention(False), r"attention\.causal is false"),
    "an embedding model": (lambda w: w.add_pooling_type(gguf.PoolingType.LAST), "pooling_type is 3"),
    "another width of values": (lambda w: w.add_value_length(8), r"attention\.value_length is 8"),
    "window": (lambda w: w.add_sliding_window(64), r"attention\.sliding_window"),
    "unknown key": (lambda w: w.add_uint32("llama.attention.softcap", 8), "nothing here reads"),
    "parts": (lambda w: w.add_uint16("split.count", 3), "one of several parts"),
    "kind of tokenizer": (lambda w: w.add_tokenizer_model("bert"), "tokenizer.ggml.model is 'bert'"),
    "tokens missing": (lambda w: w.add_tokenizer_model("gpt2"), "tokenizer.ggml.tokens is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gguf_when_it_needs_what_is_not_supported_then_is_refused_by_name(case: str, tmp_path: Path):
    keys, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", hot_model("llama"), keys=keys))


def test_gguf_when_tensors_are_missing_extra_or_misshaped_then_lists_all(tmp_path: Path):
    path = write_gguf(
        tmp_path / "model.gguf", hot_model("llama"), blk__0__attn_q__weight=None, strange=np.zeros((2, 2), np.float32),
        blk__1__ffn_norm__weight=np.ones(65, np.float32),
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    for text in (
        "1 missing: blk.0.attn_q.weight",
        "1 unused: strange",
        "blk.1.ffn_norm.weight (in model.gguf) has [65], expected [64]",
    ):
        assert text in str(caught.value)


def test_gguf_when_of_another_architecture_then_lists_the_supported(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(InputError, match=r"general.architecture is 'mamba'; supported are llama, qwen2"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_when_cut_or_flipped_anywhere_in_its_header_then_is_refused_or_the_same(tmp_path: Path):
    model = hot_model("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16, head_dim=4)
    path = write_gguf(tmp_path / "model.gguf", model)
    content = path.read_bytes()
    header = content.rindex(b".weight") + 40
    config = open_checkpoint(path).config
    for end in [*range(0, header, 3), len(content) - 1, len(content) // 2]:
        path.write_bytes(content[:end])
        with pytest.raises(InputError):
            open_checkpoint(path)
    path.write_bytes(content + b"\0" * 64)
    with pytest.raises(InputError, match="64 extra bytes"):
        open_checkpoint(path)
    same = 0
    for byte in range(header):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << byte % 8
        path.write_bytes(damaged)
        try:
            same += open_checkpoint(path).config == config
        except TformerError:
            continue
    assert same < header // 3


@pytest.mark.parametrize(("move", "what"), [(64, "a hole"), (-64, "an overlap")])
def test_gguf_when_a_tensor_lies_elsewhere_then_is_refused(move: int, what: str, tmp_path: Path):
    path = write_gguf(tmp_path / "model.gguf", hot_model("llama"))
    content = path.read_bytes()
    name = b"blk.2.ffn_down.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, their sizes, format; then the offset
    offset = int.from_bytes(content[place : place + 8], "little")
    path.write_bytes(content[:place] + (offset + move).to_bytes(8, "little") + content[place + 8 :])
    with pytest.raises(InputError, match=f"has {what} before tensor"):
        open_checkpoint(path)


def test_pointer_when_in_place_of_a_gguf_then_says_git_lfs(tmp_path: Path):
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "utf-8")
    with pytest.raises(InputError, match="Git-LFS pointer"):
        open_checkpoint(tmp_path / "m.gguf")


TEXTS = [
    "", " ", "  ", "Hello world", " leading", "trailing ", "a  b\n\n c\t\td", "it's we'll I'D", "1234 5678.90", " 12 a1b2", "naïve café",
    "漢字かな交じり", "Ελληνικά", "🙂👩‍👩‍👧", "x = [i**2 for i in range(10)]\n", "<|im_start|>user\nHi<|im_end|>", "a<|endoftext|>b", "\r\n\r\n",
    "ﬁ \u00a0\u2003x", "عربى", "\x00\x01", "…—“quoted”", "A" * 500,
]  # fmt: skip


def test_smollm2_tokenizer_when_converted_then_encodes_as_transformers_does(smollm2_gguf: Path, shared_data: Path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    checkpoint = open_checkpoint(smollm2_gguf)
    ours = Tokenizer.from_str(checkpoint.assets()["tokenizer.json"].decode("utf-8"))
    lines = (shared_data / "spec_bench.jsonl").read_text("utf-8").splitlines()
    texts = TEXTS + [json.loads(line)["turns"][0] for line in lines[::8]]
    assert len(texts) > 60 + 20
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.assets()["chat_template.jinja"].decode("utf-8") == theirs.chat_template


def test_smollm2_when_asked_for_the_capital_of_france_then_says_paris(smollm2_gguf: Path):
    checkpoint, decoder = open_checkpoint(smollm2_gguf), Decoder.from_pretrained(smollm2_gguf)
    tokenizer = Tokenizer.from_str(checkpoint.assets()["tokenizer.json"].decode("utf-8"))
    ids = torch.tensor([tokenizer.encode("The capital of France is").ids])
    with torch.no_grad():
        for _ in range(2):
            ids = torch.cat((ids, decoder(ids)[:, -1:].argmax(-1)), dim=1)
    assert tokenizer.decode(ids[0].tolist()).startswith("The capital of France is Paris.")


@pytest.mark.slow
def test_gemma3_when_read_by_transformers_too_then_ids_and_logits_are_equal(gemma3_gguf: Path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(gemma3_gguf.parent, gguf_file=gemma3_gguf.name)
    checkpoint = open_checkpoint(gemma3_gguf)
    ours = Tokenizer.from_str(checkpoint.assets()["tokenizer.json"].decode("utf-8"))
    for text in [*TEXTS, "   indented\n\n\n\tcode  x"]:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
    ids = torch.tensor([ours.encode("Once upon a time, in a village by the sea, there lived a boy who " * 40).ids[:640]])
    assert checkpoint.config.window < ids.shape[1]
    with torch.no_grad():
        logits = Decoder.from_pretrained(gemma3_gguf)(ids)[:, ::40]
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gemma3_gguf.parent, gguf_file=gemma3_gguf.name, attn_implementation="eager", dtype=torch.float32
        ).eval()
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, ::40]
    assert float((logits - expected).abs().max()) < 1e-3  # of logits up to 35
    assert float(expected.abs().max()) > 20


def test_sentencepiece_tokenizer_when_converted_then_encodes_as_the_original(
    shared_models: Path, shared_data: Path, tmp_path: Path
):
    original = json.loads((shared_models / "stories260k" / "tokenizer.json").read_text("utf-8"))
    tokens = sorted(original["model"]["vocab"], key=original["model"]["vocab"].__getitem__)

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0 if index < 259 else 259.0 - index for index in range(len(tokens))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    model = hot_model("llama", vocab_size=512)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, keys=keys))
    ours, theirs = (
        Tokenizer.from_str(text) for text in (checkpoint.assets()["tokenizer.json"].decode("utf-8"), json.dumps(original))
    )
    lines = (shared_data / "spec_bench.jsonl").read_text("utf-8").splitlines()
    for text in [*TEXTS, *(json.loads(line)["turns"][0] for line in lines[::40])]:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    golden = json.loads((shared_models / "stories260k" / "golden_llama2c_test_all.json").read_text("utf-8"))
    assert ours.decode(golden["ids"]) == golden["expected_text"]


def byte_level_keys(pre: str, **more: object) -> Keys:
    """A byte-level vocabulary of 256 bytes, a few merges and one special token."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["1 2", "12 3", "123 4", "a b", "Ġ 1"]
    tokens = [*alphabet, *(text.replace(" ", "") for text in merged), "<s>"]

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - 1) + [3])
        writer.add_token_merges([*merged, *more.get("merges", [])])
        writer.add_bos_token_id(len(tokens) - 1)

    return keys


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["ab", "Ġ", "1234"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["<s>", "ab", "Ġ", "123", "4"]),
    ],
)
def test_pre_tokenizer_when_named_then_splits_as_that_name_means(pre: str, expected: list[str], tmp_path: Path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", hot_model("llama", vocab_size=262), keys=byte_level_keys(pre)))
    assert Tokenizer.from_str(checkpoint.assets()["tokenizer.json"].decode("utf-8")).encode("ab 1234").tokens == expected


def test_tokenizer_when_its_parts_are_unknown_then_is_refused_by_name(tmp_path: Path):
    model = hot_model("llama", vocab_size=262)
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre is 'viking'; supported are gpt-2, phi-2"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", model, keys=byte_level_keys("viking")))
    with pytest.raises(InputError, match=r"merges has 'a zz', which names an unknown token"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", model, keys=byte_level_keys("gpt-2", merges=["a zz"])))
