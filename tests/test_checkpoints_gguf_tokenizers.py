"""Tokenizers inside GGUF files: those of transformers over the same vocabulary give the same ids; pieces as published otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import transformers
from test_checkpoints_gguf import TEXTS
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tformer_deploy.checkpoints.gguf.file import GgufFile
from tformer_deploy.checkpoints.gguf.pre_tokenizers import known_pre_tokenizers
from tformer_deploy.checkpoints.gguf.tokenizer import read_gguf_tokens

DECOMPOSED = "cafe\u0301 nai\u0308ve \u1100\u1161"
PROBE = "Hello WORLD'S it'll 12345 1.5\n\n  x=a+b; (yes!) HelloWorld naïve مرحبا، ok… 漢字12\t\tend  "
DIGITS = [" ", "1", "2", "3", "4", "5", " ", "1", ".", "5"]
GPT2 = [" x", "=", "a", "+", "b", ";", " (", "yes", "!)", " HelloWorld", " naïve", " مرحبا", "،", " ok", "…", " 漢字"]
CL100K = [" x", "=a", "+b", ";", " (", "yes", "!)", " HelloWorld", " naïve", " مرحبا", "،", " ok", "…", " 漢字"]
PIECES = {
    "gpt-2": ["Hello", " WORLD", "'", "S", " it", "'ll", " 12345", " 1", ".", "5", "\n\n ", *GPT2, "12", "\t", "\t", "end", "  "],
    "smollm": ["Hello", " WORLD", "'", "S", " it", "'ll", *DIGITS, "\n\n ", *GPT2, "1", "2", "\t", "\t", "end", "  "],
    "llama-bpe": [
        "Hello", " WORLD", "'S", " it", "'ll", " ", "123", "45", " ", "1", ".", "5", "\n\n", " ", *CL100K, "12", "\t", "\tend", "  ",
    ],
    "qwen2": ["Hello", " WORLD", "'S", " it", "'ll", *DIGITS, "\n\n", " ", *CL100K, "1", "2", "\t", "\tend", "  "],
    "tekken": [
        "Hello", " WORLD", "'S", " it", "'ll", *DIGITS, "\n\n", " ", *CL100K[:7], " Hello", "World", *CL100K[8:], "1", "2",
        "\t", "\tend", "  ",
    ],
    "gpt-4o": [
        "Hello", " WORLD'S", " it'll", " ", "123", "45", " ", "1", ".", "5", "\n\n", " ", *CL100K[:7], " Hello", "World",
        *CL100K[8:], "12", "\t", "\tend", "  ",
    ],
    "bloom": [
        "Hello", " WORLD'S", " it'll", " 12345", " 1", ".", "5", "\n\n ", " x=a+b;", " (", "yes", "!)", " HelloWorld", " naïve",
        " مرحبا", "،", " ok", "…", " 漢字12", "\t\t", "end", "  ",
    ],
    "deepseek-coder": [
        "Hello", " WORLD", "'", "S", " it", "'", "ll", *DIGITS, "\n", "\n", " ", *GPT2[:-1], " ", "漢字", "1", "2",
        "\t", "\tend", "  ",
    ],
}  # fmt: skip
SAME = {
    "phi-2": "gpt-2", "olmo": "gpt-2", "mpt": "gpt-2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm",
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "dbrx": "llama-bpe", "smaug-bpe": "llama-bpe", "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
}  # fmt: skip
THEIRS = {
    "gpt-2": transformers.GPT2Tokenizer,
    "phi-2": transformers.CodeGenTokenizer,
    "olmo": transformers.GPTNeoXTokenizer,
    "qwen2": transformers.Qwen2Tokenizer,
    "command-r": transformers.CohereTokenizer,
}


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A byte-level vocabulary whose merges cross every boundary there is, so that ids tell where text was cut."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=2, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    texts = [text for text in [*TEXTS, PROBE, "caf\u00e9 na\u00efve \uac00"] if len(text) < 200]
    tokenizer.train_from_iterator(texts * 3, trainer)
    return tokenizer


def converted(path: Path, trained: Tokenizer, pre: str) -> Tokenizer:
    """What becomes of that vocabulary in a GGUF file with that ``tokenizer.ggml.pre``."""
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges([" ".join(pair) for pair in merges(trained)])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_str(read_gguf_tokens(GgufFile(path), len(tokens)).assets["tokenizer.json"].decode("utf-8"))


def merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@pytest.mark.parametrize("pre", THEIRS)
def test_ids_when_transformers_has_that_tokenizer_then_are_its_own(pre: str, trained: Tokenizer, tmp_path: Path):
    ours = converted(tmp_path / "m.gguf", trained, pre)
    theirs = THEIRS[pre](vocab=trained.get_vocab(), merges=merges(trained), eos_token="<|endoftext|>")
    crossing = trained.encode(PROBE).ids
    assert ours.encode(PROBE).ids != crossing, "a cut changes nothing in this vocabulary"
    for text in [*TEXTS, PROBE, DECOMPOSED]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"], text


@pytest.mark.parametrize("pre", [*PIECES, *SAME])
def test_pieces_when_text_is_cut_then_are_as_published(pre: str):
    step = known_pre_tokenizers()[pre].step()
    assert [PROBE[start:end] for _, (start, end) in step.pre_tokenize_str(PROBE)] == PIECES[SAME.get(pre, pre)]


def test_falcon_pieces_when_text_has_digits_then_are_threes_and_bytes_that_look_like_numbers():
    """Falcon looks for digits among the characters that stand for bytes, of which 0xB2, 0xB3, 0xB9 and 0xBC–0xBE are numbers."""
    step = known_pre_tokenizers()["falcon"].step()
    text = "Hello, WORLD'S it'll 1234567 1.5 м"
    pieces = [piece for piece, _ in step.pre_tokenize_str(text)]
    assert pieces == [
        "Hello", ",", "ĠWORLD", "'", "S", "Ġit", "'", "ll", "Ġ", "123", "456", "7", "Ġ", "1", ".", "5", "ĠÐ", "¼",
    ]  # fmt: skip


def test_every_known_name_when_listed_then_is_tested():
    assert set(known_pre_tokenizers()) == {*PIECES, *SAME, "falcon"}


@pytest.mark.parametrize(
    "pre", ["olmo", "mpt", "qwen2", "stablelm2", "deepseek-r1-qwen", "command-r", "gpt-2", "llama-bpe", "dbrx"]
)
def test_decomposed_text_when_the_family_composes_it_then_is_composed(pre: str, trained: Tokenizer, tmp_path: Path):
    ours = converted(tmp_path / "m.gguf", trained, pre)
    composes = pre not in ("gpt-2", "llama-bpe", "dbrx")
    composed = "caf\u00e9 na\u00efve \uac00"
    assert ours.decode(ours.encode(DECOMPOSED, add_special_tokens=False).ids) == (composed if composes else DECOMPOSED)


def test_merges_when_a_whole_piece_is_a_token_then_are_ignored_only_where_the_family_does(trained: Tokenizer, tmp_path: Path):
    """A token that no merge makes: with the merges alone it cannot come about."""
    for pre, whole in (("llama-bpe", True), ("tekken", True), ("dbrx", False), ("qwen2", False)):
        model = Tokenizer(models.BPE(vocab={**trained.get_vocab(), "zqx": trained.get_vocab_size()}, merges=merges(trained)))
        ours = converted(tmp_path / f"{pre}.gguf", model, pre)
        tokens = ours.encode("zqx", add_special_tokens=False).tokens
        assert (tokens == ["zqx"]) == whole
        assert (ours.encode("a").tokens[0] == "<|endoftext|>") == whole, "begin of text by default"


def test_gemma_tokenizer_when_no_space_is_put_before_a_text_then_ids_equal_transformers(shared_models: Path, tmp_path: Path):
    original = json.loads((shared_models / "stories260k" / "tokenizer.json").read_text("utf-8"))["model"]
    tokens = sorted(original["vocab"], key=original["vocab"].__getitem__)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0 if index < 259 else 259.0 - index for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens_of_file = read_gguf_tokens(GgufFile(tmp_path / "m.gguf"), len(tokens))
    ours = Tokenizer.from_str(tokens_of_file.assets["tokenizer.json"].decode("utf-8"))
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in original["merges"]]
    theirs = transformers.GemmaTokenizer(vocab=original["vocab"], merges=pairs)
    for text in [*TEXTS, PROBE, "Once upon a time  there was\n a girl."]:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=False)
