"""Generator, stopping and tokenizer over a scripted model: the ids that come are the test's own."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from tformer_deploy.errors import InputError
from tformer_deploy.generation import Generator, Request, Tokenizer, load_tokenizer
from tformer_deploy.generation.sampling import LogitsError

VOCAB = 300
BOS, EOS = 256, 257
WORDS = {258: "ab", 259: "a", 260: "b", 261: "xa", 262: "by", 263: "▁hi"}


def byte_tokenizer_json(post_processor: bool = False) -> bytes:
    """Ids 0 … 255 are bytes, then a few words; ids from 264 on are the model's alone."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<s>": BOS, "</s>": EOS} | {word: i for i, word in WORDS.items()}
    raw = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")], byte_fallback=True, unk_token="<s>"))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(["<s>", "</s>"])
    raw.enable_truncation(4)
    raw.enable_padding(length=9, pad_id=0)
    if post_processor:
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return raw.to_str().encode()


@functools.lru_cache  # a process each
def byte_tokenizer(post_processor: bool = False, template: str | None = None) -> Tokenizer:
    return Tokenizer(byte_tokenizer_json(post_processor), template, "<s>", "</s>")


class Scripted:
    """A session whose rows continue as ``scripts`` say, by the first id of their prompt; then with id 299."""

    def __init__(self, scripts: dict[int, list[int]]) -> None:
        self.backend = SimpleNamespace(max_length=10_000, max_batch=None)
        self.scripts, self.rows = scripts, list[list[int]]()

    def _logits(self, rows: list[list[int]]) -> np.ndarray:
        logits = np.zeros((len(rows), VOCAB), np.float32)
        for i, row in enumerate(rows):
            script = self.scripts.get(row[0], [])
            done = len(row) - 1
            logits[i, script[done] if done < len(script) else VOCAB - 1] = 9
        return logits

    def prefill(self, rows: list[list[int]]) -> np.ndarray:
        self.rows = [list(row) for row in rows]
        return self._logits(self.rows)

    def refill(self, slots: list[int], rows: list[list[int]]) -> np.ndarray:
        for slot, row in zip(slots, rows, strict=True):
            self.rows[slot] = list(row)
        return self._logits([self.rows[slot] for slot in slots])

    def decode(self, tokens: list[int]) -> np.ndarray:
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        return self._logits(self.rows)

    def retire(self, slots: list[int]) -> None:
        for slot in slots:
            self.rows[slot] = [-1]

    def compact(self) -> list[int]:
        kept = [i for i, row in enumerate(self.rows) if row[0] != -1]
        self.rows = [self.rows[i] for i in kept]
        return kept


def scripted(*scripts: list[int], eos: tuple[int, ...] = (EOS,)) -> Generator:
    return Generator(Scripted(dict(enumerate(scripts))), byte_tokenizer(), eos)  # type: ignore[arg-type]


def request(first: int = 0, **fields) -> Request:
    return Request((first,), **fields)


def test_generate_when_any_id_of_the_eos_list_comes_then_ends_with_it_outside_the_text():
    rows = [[259, 260, end, 259] for end in (EOS, 3, 5)]
    done = scripted(*rows, eos=(EOS, 3, 5)).generate([request(i) for i in range(3)])
    assert [c.output_ids for c in done] == [(259, 260, EOS), (259, 260, 3), (259, 260, 5)]
    assert {(c.text, c.finish_reason) for c in done} == {("ab", "stop")}


def test_generate_when_a_stop_string_spans_tokens_in_one_row_then_only_that_row_stops():
    rows = [[261, 262, 259, EOS], [261, 259, 259, EOS], [259, 260, 260, EOS]]
    requests = [request(i, stop=("ab",) if i != 1 else ("zz", "ab")) for i in range(3)]
    done = scripted(*rows).generate(requests, max_batch=2)
    assert [(c.text, c.output_ids, c.finish_reason) for c in done] == [
        ("x", (261, 262), "stop"), ("xaaa", (261, 259, 259, EOS), "stop"), ("", (259, 260), "stop"),
    ]  # fmt: skip
    assert done == [scripted(*rows).generate([r])[0] for r in requests]


def test_generate_when_the_last_allowed_token_completes_a_stop_string_then_the_reason_is_stop():
    (done,) = scripted([259, 260]).generate([request(max_new_tokens=2, stop=("ab",))])
    assert (done.text, done.finish_reason) == ("", "stop")


def test_generate_when_there_are_more_rows_than_slots_then_each_gets_its_own_completion():
    rows = [[259] * (i % 7) + [260, EOS] for i in range(23)]
    done = scripted(*rows).generate([request(i) for i in range(23)], max_batch=4)
    assert [c.output_ids for c in done] == [tuple(row) for row in rows]


def test_generate_when_ids_are_beyond_the_tokenizer_then_they_are_empty_text():
    (done,) = scripted([259, 298, 260, EOS]).generate([request()])
    assert (done.text, done.output_ids) == ("ab", (259, 298, 260, EOS))


@pytest.mark.parametrize("fields", [{"input_ids": ()}, {"input_ids": (1,) * 10_001}])
def test_generate_when_a_prompt_cannot_run_then_is_refused(fields: dict):
    with pytest.raises(InputError):
        scripted([]).generate([Request(**fields)])


def streamed(generator: Generator, wanted: Request) -> tuple[list[str], str | None]:
    pieces: list[str] = []
    return pieces, generator.stream(wanted, pieces.append).text


def test_stream_when_characters_take_several_tokens_then_no_piece_has_half_of_one():
    text = "naïve 😀😀 é x"
    pieces, whole = streamed(scripted([*text.encode(), EOS]), request())
    assert "".join(pieces) == whole == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert len(pieces) > 5


def test_stream_when_a_stop_string_is_coming_then_nothing_of_it_is_shown():
    pieces, whole = streamed(scripted([259, 259, 261, 262, 259]), request(stop=("aby",)))
    assert "".join(pieces) == whole == "aax"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 255), st.integers(258, 299)), max_size=24), st.sampled_from([(), ("ab",), ("é", "xa")]))
def test_stream_when_any_ids_come_then_the_pieces_are_the_text_of_a_batch(ids: list[int], stop: tuple[str, ...]):
    wanted = request(stop=stop, max_new_tokens=30)
    pieces, whole = streamed(scripted([*ids, EOS]), wanted)
    assert whole == scripted([*ids, EOS]).generate([wanted])[0].text
    assert not any(s in whole for s in stop)
    if "\ufffd" not in whole:
        assert "".join(pieces) == whole


def test_stream_when_logits_are_not_finite_then_says_so():
    generator = scripted([259])
    generator.session._logits = lambda rows: np.full((1, VOCAB), np.nan, np.float32)  # type: ignore[attr-defined]
    with pytest.raises(LogitsError, match="nan"):
        generator.stream(request(), lambda text: None)


def test_decode_when_a_word_starts_with_a_space_then_it_stays_after_a_prompt():
    assert byte_tokenizer().decode([263], [259, 263]) == " hi"


def test_encode_when_the_file_asks_to_cut_and_pad_then_neither_is_done():
    assert len(byte_tokenizer().encode("abababab")) == 4
    assert byte_tokenizer().encode("ab" * 50) == [258] * 50


@pytest.mark.parametrize("text", ["", "\x00", "\uffff", "😀", "שלום", "a" * 10_000])
def test_encode_when_text_is_strange_then_decodes_to_itself(text: str):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encode_when_text_holds_a_lone_surrogate_then_is_refused():
    for encode in (byte_tokenizer(template="{{ messages }}").encode, byte_tokenizer(template="{{ messages }}").encode_chat):
        with pytest.raises(InputError, match="surrogate"):
            encode("\ud800")


def test_encode_chat_when_template_and_tokenizer_both_add_bos_then_there_is_one():
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}{% if tools is not none %}tools{% endif %}"
    tokenizer = byte_tokenizer(post_processor=True, template=template)
    assert tokenizer.encode("ab") == [BOS, 258]
    assert tokenizer.encode_chat("ab") == [BOS, 258]


def test_encode_chat_when_there_is_no_template_then_is_refused():
    with pytest.raises(InputError, match="no chat template"):
        byte_tokenizer().encode_chat("a")


def bundle(**assets: bytes) -> SimpleNamespace:
    names = {name.replace("_json", ".json").replace("_jinja", ".jinja"): data for name, data in assets.items()}
    return SimpleNamespace(asset=names.get)


def test_load_tokenizer_when_files_differ_then_takes_the_template_that_counts():
    data = byte_tokenizer_json()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "D{{ eos_token }}"}]
    config = json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}).encode()
    loaded = load_tokenizer(bundle(tokenizer_json=data, tokenizer_config_json=config))
    assert loaded is not None
    assert loaded.encode_chat("x")[-1] == EOS
    loaded = load_tokenizer(bundle(tokenizer_json=data, tokenizer_config_json=config, chat_template_jinja=b"ab"))
    assert loaded is not None
    assert loaded.encode_chat("x") == [258]
    assert load_tokenizer(bundle()) is None


@pytest.mark.parametrize(
    "assets",
    [{"tokenizer_json": b"{}"}, {"tokenizer_json": b""}, {"tokenizer_json": b"GOOD", "tokenizer_config_json": b"[]"},
     {"tokenizer_json": b"GOOD", "chat_template_jinja": b"\xff"}],
)  # fmt: skip
def test_load_tokenizer_when_a_file_is_damaged_then_is_refused_by_name(assets: dict[str, bytes]):
    good = byte_tokenizer_json()
    with pytest.raises(InputError, match=r"tokenizer|chat_template"):
        load_tokenizer(bundle(**{k: good if v == b"GOOD" else v for k, v in assets.items()}))
