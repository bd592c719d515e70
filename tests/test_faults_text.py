"""Bad tokenizers, chat templates and texts end in a named refusal (3), a limit (6) or a row's own error; never in a hang.

| row | fault | tested |
|---|---|---|
| B22 | a tokenizer that knows more than the model | here; tests/test_faults_checkpoint.py (warnings) |
| B30 | tokenizer.json damaged, hostile or contradicting itself | here; tests/test_checkpoints_folder.py, tests/test_generation.py |
| B31 | expressions, replacements and files without end | here |
| B32 | chat templates: sandbox, loops, sizes, mistakes | here; tests/test_run.py |
| B33 | strange texts; characters that would be dropped | here; tests/test_generation.py |
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fault_files import Console, console, cuts, flips, sweep, tokenizer_json, write_llama
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from tformer_deploy.bundle.verify import hash_file
from tformer_deploy.checkpoints.tokens import token_ids
from tformer_deploy.errors import InputError, ResourceError, TformerError
from tformer_deploy.generation import Tokenizer
from tformer_deploy.generation.chat import render
from tformer_deploy.generation.tokenizer_child import _Tokenizer
from tformer_deploy.generation.tokenizer_process import TokenizerProcess
from tformer_deploy.strict_json import parse_object

__all__ = ["console"]
pytestmark = pytest.mark.timeout(60)


def encoded(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw).encode()


def model(**changes: Any) -> dict[str, Any]:
    """``tokenizer_json`` with changes to its model."""
    return tokenizer_json(model=tokenizer_json()["model"] | changes)


def added(**changes: Any) -> dict[str, Any]:
    """With one more added token."""
    raw = tokenizer_json()
    raw["added_tokens"].append(raw["added_tokens"][0] | {"content": "<more>", "id": 24} | changes)
    return raw


BPE: dict[str, Any] = {
    "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
    "byte_fallback": False, "ignore_merges": False, "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": [["a", "b"]],
}  # fmt: skip


def bpe(**changes: Any) -> dict[str, Any]:
    return tokenizer_json(model=BPE | changes, added_tokens=[], pre_tokenizer=changes.pop("pre", None))


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


VOCABULARY: dict[str, int] = tokenizer_json()["model"]["vocab"]
TEMPLATE = {
    "type": "TemplateProcessing",
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
}
SPECIAL = [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]

# B30
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "tokenizer.json is empty"),
    "no keys": (b"{}", "no vocabulary of a known form"),
    "list": (b"[]", "holds a JSON list"),
    "NaN": (b'{"a": NaN}', "a is NaN"),
    "cut": (encoded(tokenizer_json())[:-9], "is not JSON"),
    "a key twice": (b'{"version": "1.0", "version": "1.0"}', "'version' twice"),
    "bad expression": (encoded(tokenizer_json(pre_tokenizer=split("(((("))), "parenthesis"),
    "bad expression in the normalizer": (encoded(tokenizer_json(normalizer=replace({"Regex": "[z-a]"}, "x"))), "tokenizer.json cannot be read"),
    "an id twice": (encoded(model(vocab=VOCABULARY | {"x": 5})), "gives the id 5 to 'w5' and to 'x'"),
    "an id twice by an added token": (encoded(added(id=1)), "gives the id 1 to '<s>' and to '<more>'"),
    "a token with two ids": (encoded(added(content="w5")), "gives 'w5' the ids 5 and 24"),
    "id 2^31": (encoded(model(vocab=VOCABULARY | {"x": 2**31})), "'x' has the id 2147483648; expected a whole number from 0 to 2147483647"),
    "id 2^31 of an added token": (encoded(added(id=2**31)), "'<more>' has the id 2147483648"),
    "id below zero": (encoded(model(vocab=VOCABULARY | {"x": -1})), "'x' has the id -1"),
    "id no whole number": (encoded(model(vocab=VOCABULARY | {"x": 24.0})), "'x' has the id 24.0"),
    "id a truth value": (encoded(model(vocab=VOCABULARY | {"x": True})), "'x' has the id True"),
    "a gap before an added token": (encoded(added(id=500)), "the added token '<more>' has the id 500"),
    "an added token without content": (encoded(added(content=7)), "an added token without content and id"),
    "merge of an unknown token": (encoded(bpe(merges=[["a", "zz"]])), "`zz` out of vocabulary"),
    "merge to an unknown token": (encoded(bpe(merges=[["a", "c"]])), "`ac` out of vocabulary"),
    "merge of three": (encoded(bpe(merges=[["a", "b", "c"]])), "MergeType"),
    "model of no type": (encoded(tokenizer_json(model={"vocab": {"a": 0}}, added_tokens=[])), "tokenizer.json cannot be read"),
    "model of another type": (encoded(model(type="Evil")), "tokenizer.json cannot be read"),
    "version": (encoded(tokenizer_json(version="9.0")), "Unknown tokenizer version"),
    "unknown special token": (encoded(tokenizer_json(post_processor=TEMPLATE | {"single": SPECIAL, "special_tokens": {}})), "tokenizer.json cannot be read"),
    "normalizer of garbage": (encoded(tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})), "precompiled_charsmap"),
    "unknown step": (encoded(tokenizer_json(pre_tokenizer={"type": "Evil"})), "tokenizer.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_export_when_the_tokenizer_is_damaged_then_says_why(case: str, console: Console, tmp_path: Path):
    path = write_llama(tmp_path / "checkpoint")
    content, words = DAMAGED[case]
    (path / "tokenizer.json").write_bytes(content)
    console.export_refused(path, "tokenizer.json", words)


@pytest.mark.parametrize(
    "case", ["no keys", "bad expression", "unknown special token", "a gap before an added token", "merge of three"]
)
def test_tokenizer_when_damaged_in_a_bundle_then_says_why_without_noise(case: str, capfd: pytest.CaptureFixture[str]):
    """The library panics on some: neither that nor a backtrace reaches the terminal."""
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be read") as caught:
        Tokenizer(DAMAGED[case][0])
    assert caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_tokenizer_when_dropout_is_on_then_gives_the_same_ids_each_time():
    process = TokenizerProcess(encoded(bpe(dropout=0.9)))
    assert {tuple(process.encode("abab", special=True)) for _ in range(20)} == {(2, 2)}


# B31

ENDLESS = {
    "nested": (r"(a+)+$", "a" * 30 + "b"),
    "nested, in long texts": (r"(a+)+$", ("a" * 22 + "b") * 4000),
    "alternatives": (r"(a|aa)+$", ("a" * 30 + "b") * 4000),
    "dots": (r"(.*a){20}$", "a" * 30 + "b"),
}


@pytest.mark.parametrize("case", ENDLESS)
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer"])
def test_encode_when_an_expression_takes_for_ever_then_the_limit_ends_it(
    case: str, place: str, capfd: pytest.CaptureFixture[str]
):
    pattern, text = ENDLESS[case]
    process = TokenizerProcess(
        encoded(bpe() | {place: split(pattern) if place == "pre_tokenizer" else replace({"Regex": pattern}, "c")})
    )
    started = time.monotonic()
    with pytest.raises(ResourceError, match=r"tokenizer\.json cannot encode the text within 3 s"):
        process.encode(text, special=True)
    assert time.monotonic() - started < 12
    assert process.encode("ab", special=True) == [2]  # started again
    assert capfd.readouterr() == ("", "")


def test_encode_when_a_replacement_fills_the_memory_then_the_limit_ends_it():
    process = TokenizerProcess(encoded(bpe() | {"normalizer": replace({"String": "a"}, "c" * 4_000_000)}))
    with pytest.raises(ResourceError):
        process.encode("a" * 4000, special=True)


def test_decode_when_a_replacement_fills_the_memory_then_the_limit_ends_it():
    process = TokenizerProcess(encoded(bpe() | {"decoder": replace({"String": "a"}, "c" * 4_000_000)}))
    with pytest.raises(ResourceError):
        process.decode([0] * 4000, [])


def test_tokenizer_when_garbage_claims_all_memory_then_is_refused_by_a_name_or_a_limit(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(TformerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(encoded(tokenizer_json(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="})))
    assert capfd.readouterr() == ("", "")


def test_tokenizer_when_a_limit_was_reached_then_no_process_is_left():
    process = TokenizerProcess(encoded(bpe() | {"pre_tokenizer": split(r"(a+)+$")}))
    child = process._process
    assert child is not None
    with pytest.raises(ResourceError):
        process.encode("a" * 30 + "b", special=True)
    process.encode("ab", special=True)
    again = process._process
    assert again is not None
    os.kill(again.pid, signal.SIGKILL)  # as when the machine runs out of memory
    with pytest.raises(ResourceError):
        process.encode("ab", special=True)
    assert process.encode("ab", special=True) == [2]
    last = process._process
    assert last is not None
    del process
    gc.collect()
    assert [p.poll() is not None for p in (child, again, last)] == [True] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tokenizer_when_of_fifty_megabytes_then_loads_or_a_limit_ends_it():
    words = {f"w{i:07d}xxxxxxxxxx": i for i in range(24, 1_900_000)}
    content = encoded(model(vocab=VOCABULARY | words))
    assert len(content) > 50_000_000
    try:
        assert TokenizerProcess(content).encode("w5", special=True) == [5]
    except ResourceError:
        return


# B32

SECURITY = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
    "lipsum": "{{ lipsum.__globals__['os'].mkdir('CANARY') }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "append": "{{ messages.append(1) }}",
    "syntax": "{% if %}",
    "unclosed": "{% for m in messages %}",
    "missing": "{{ nothing.at_all }}",
    "own error": "{{ raise_exception('no system role') }}",
    "own error with escapes": "{{ raise_exception('\x1b[31m\nError: all is well') }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "unknown tag": "{% debug %}",
    "surrogate": "{{ '\\ud800' }}",
}
LIMITS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long loop": "{% for a in range(10**9) %}x{% endfor %}",
    "sums": "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a text of 100 MB": "{{ 'a' * 10**8 }}",
    "width": "{{ '%1000000000d'|format(1) }}",
    "doubling": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "indent": "{{ messages|tojson(indent=10**9) }}",
    "macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.fixture(scope="module")
def text_bundle(llama_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama-like bundle with a tokenizer of words; copy it before editing."""
    path = Path(shutil.copytree(llama_bundle, tmp_path_factory.mktemp("text") / "bundle"))
    return with_files(path, **{"tokenizer.json": encoded(tokenizer_json())})


def with_files(bundle: Path, **files: bytes) -> Path:
    """Files added, and hashes that agree: what somebody with bad intentions would write."""
    raw = json.loads((bundle / "manifest.json").read_bytes())
    for name, content in files.items():
        (bundle / name).write_bytes(content)
        record = hash_file(bundle / name)
        raw["files"][name] = {"sha256": record.sha256, "size": record.size}
    (bundle / "manifest.json").write_text(json.dumps(raw))
    return bundle


@pytest.mark.parametrize(("case", "code"), [(c, 3) for c in SECURITY] + [(c, 6) for c in LIMITS])
def test_template_when_hostile_then_is_refused_or_limited_and_touches_nothing(
    case: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    template = SECURITY.get(case) or LIMITS[case]
    started = time.monotonic()
    with pytest.raises(TformerError) as caught:
        Tokenizer(encoded(tokenizer_json()), template).encode_chat("w5")
    assert caught.value.exit_code == code, str(caught.value)
    assert time.monotonic() - started < 12
    assert str(caught.value).isprintable()
    assert caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("case", "code"), [("class", 3), ("syntax", 3), ("own error with escapes", 3), ("a long loop", 6), ("a long text", 6)]
)
def test_generate_when_the_template_is_hostile_then_keeps_its_promise(
    case: str, code: int, console: Console, text_bundle: Path, tmp_path: Path
):
    template = (SECURITY.get(case) or LIMITS[case]).encode()
    bundle = with_files(Path(shutil.copytree(text_bundle, tmp_path / "b")), **{"chat_template.jinja": template})
    console.refused(code, ("chat template",), "generate", bundle, "w5", "--chat")


def test_template_when_well_behaved_then_is_rendered():
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w7{% endif %}"
    assert render(template, [{"role": "user", "content": "w5"}], "<s>", "</s>") == "<s>user w5 w7"


def test_template_when_a_file_of_it_is_damaged_then_is_named(console: Console, text_bundle: Path, tmp_path: Path):
    for name, content, words in (
        ("chat_template.jinja", b"\xff", "not UTF-8: byte 0"),
        ("tokenizer_config.json", b"[]", "holds a JSON list"),
        ("tokenizer_config.json", b'{"a": 1, "a": 2}', "'a' twice"),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', "surrogate"),
    ):
        bundle = with_files(Path(shutil.copytree(text_bundle, tmp_path / "b")), **{name: content})
        console.refused(3, (name, words), "generate", bundle, "w5", "--chat")
        shutil.rmtree(bundle)


# B22, B33

STRANGE = ["w3\0w4", "\uffff", "\ufeffw3", "\u202eשלום", "w3\u2028w4", "漢字", "😀" * 1000, "w3 " * 100]


def test_run_when_texts_are_strange_then_each_is_handled_or_is_its_own_error(console: Console, text_bundle: Path, tmp_path: Path):
    texts = [*STRANGE, "w" * 1_000_000, "w3 \ud800", "", "  ", "w5"]
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\n".join(json.dumps({"prompt": text}).encode() for text in texts))
    code, out, err = console.run("run", text_bundle, rows, "-o", "-", "--max-new-tokens", "1")
    results = [json.loads(line) for line in out.splitlines()]
    assert (code, len(results)) == (1, len(texts)), err
    codes = [row.get("error", {}).get("code") for row in results]
    assert codes == [None] * (len(STRANGE) + 1) + ["invalid_field", "empty_prompt", "empty_prompt", None]
    assert [row["prompt_tokens"] for row in results[:2]] == [1, 1]  # one unknown word each, not nothing
    assert "surrogate" in results[-4]["error"]["message"]


@pytest.mark.parametrize(("text", "words"), [("\ud800", "lone surrogate"), ("", "empty"), ("   ", "empty")])
def test_generate_when_the_text_is_no_prompt_then_says_why(text: str, words: str, console: Console, text_bundle: Path):
    console.refused(3, (words,), "generate", text_bundle, text)


def test_generate_when_the_tokenizer_knows_more_than_the_model_then_names_the_token(
    console: Console, text_bundle: Path, tmp_path: Path
):
    raw = model(vocab=VOCABULARY | {"far": 131})
    bundle = with_files(Path(shutil.copytree(text_bundle, tmp_path / "b")), **{"tokenizer.json": encoded(raw)})
    console.refused(3, ("131 ('far')", "0 to 130"), "generate", bundle, "w5 far")


def test_generate_when_the_bundle_has_no_tokenizer_then_says_so(console: Console, llama_bundle: Path):
    console.refused(3, ("has no tokenizer", "input_ids"), "generate", llama_bundle, "text")


def level(**changes: Any) -> Library:
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(changes.pop("vocab", alphabet), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in changes.items():
        setattr(library, name, value)
    return library


def letters(**changes: Any) -> Library:
    library = Library(models.BPE({c: i for i, c in enumerate("abcé")}, []))
    for name, value in changes.items():
        setattr(library, name, value)
    return library


def lowered() -> Library:
    return letters(normalizer=normalizers.Lowercase())


HAN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("漢")[0][0]


def without(*bytes_of: str) -> dict[str, int]:
    return {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())) if c not in bytes_of}


LOST: list[tuple[str, Library, str, str]] = [
    ("a letter", letters(), "abZc", "'Z' (character 3)"),
    ("the first one", letters(), "漢ab", "(character 1)"),
    ("a space", letters(), "a b", "' ' (character 2)"),
    ("NUL", letters(), "a\0b", r"'\x00' (character 2)"),
    ("beside removed spaces", letters(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), "a Z c", "'Z' (character 3)"),
    ("one byte of a character", level(vocab=without(HAN[1])), "ab漢", "(character 3)"),
    ("the byte of a space", level(vocab=without("Ġ")), "a b", "' ' (character 2)"),
    ("after composing", letters(normalizer=normalizers.NFC()), "ae\u0300", "(character 2)"),
    ("after lowering", lowered(), "ABX", "'x' (character 3)"),
]  # fmt: skip


@pytest.mark.parametrize(("library", "text", "words"), [c[1:] for c in LOST], ids=[c[0] for c in LOST])
def test_encode_when_a_character_would_be_dropped_then_is_refused_by_name(library: Library, text: str, words: str):
    with pytest.raises(InputError, match="has no token for") as caught:
        TokenizerProcess(library.to_str().encode()).encode(text, special=True)
    assert words in str(caught.value)


KEPT: list[tuple[str, Library, str]] = [
    ("letters", letters(), "abc"),
    ("removed spaces", letters(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), " a  b\nc "),
    ("bytes", level(), "a 漢 e\u0301\0\n\n x"),
    ("bytes, offsets trimmed", level(post_processor=processors.ByteLevel(trim_offsets=True)), "  a  b"),
    ("bytes without one that does not come", level(vocab=without(HAN[1])), "ab"),
    ("composed", level(normalizer=normalizers.NFC()), "e\u0301 a\u030a"),
    ("composed letters", letters(normalizer=normalizers.NFC()), "ae\u0301"),
    ("accents removed on purpose", letters(normalizer=normalizers.StripAccents()), "a\u0301b"),
    ("lowered", lowered(), "ABC"),
]


@pytest.mark.parametrize(("library", "text"), [c[1:] for c in KEPT], ids=[c[0] for c in KEPT])
def test_encode_when_nothing_is_dropped_then_gives_the_librarys_ids(library: Library, text: str):
    process = TokenizerProcess(library.to_str().encode())
    assert process.encode(text, special=True) == library.encode(text).ids


# Sweeps: a damaged tokenizer.json is refused by the reader of ids and by the library's process, or both can use it


def attempt(piece: bytes | tuple[int, bytes]) -> Any:
    data = piece[1] if isinstance(piece, tuple) else piece
    ids = token_ids(parse_object(data, "tokenizer.json"))
    try:
        return ids, _Tokenizer(data)
    except BaseException as e:
        if isinstance(e, (KeyboardInterrupt, MemoryError)):
            raise
        return e  # the process turns whatever it is into an InputError, as the tests above show


def test_tokenizer_when_cut_anywhere_then_is_refused():
    content = encoded(tokenizer_json(pre_tokenizer=split(r"\s+"), decoder={"type": "Fuse"}))
    assert all(isinstance(r, InputError) for r in sweep(cuts(content), attempt))


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_tokenizer_when_a_bit_is_flipped_then_is_refused_or_loads(step: int, capfd: pytest.CaptureFixture[str]):
    content = encoded(bpe(pre=split(r"\s+")) | {"normalizer": replace({"Regex": "c+"}, "c"), "decoder": {"type": "Fuse"}})
    results = sweep(flips(content, step), attempt)
    capfd.readouterr()  # what the library says about its panics in this process
    assert sum(isinstance(r, BaseException) for r in results) > len(results) // 3
    assert sum(isinstance(r, tuple) for r in results) > 0


def test_process_when_a_sample_of_bits_is_flipped_then_refuses_by_name_or_encodes(capfd: pytest.CaptureFixture[str]):
    content = encoded(bpe(pre=split(r"\s+")) | {"decoder": {"type": "Fuse"}})

    def encode(piece: tuple[int, bytes]) -> list[int]:
        return TokenizerProcess(piece[1]).encode("ab", special=True)

    results = sweep(flips(content, 331), encode, 2048)
    assert all(isinstance(r, (list, InputError)) for r in results), results
    assert capfd.readouterr() == ("", "")


def test_child_when_its_input_ends_then_ends_too():
    script = Path(sys.modules[TokenizerProcess.__module__].__file__ or "").with_name("tokenizer_child.py")
    for data in (b"", b"\1", b"\xff\xff\xff\x7fabc"):
        done = subprocess.run([sys.executable, "-P", script], input=data, capture_output=True, timeout=20, check=False)
        assert done.returncode == 0 or b"MemoryError" in done.stderr
