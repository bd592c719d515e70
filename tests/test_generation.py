"""Generator, stopping and tokenizer over a scripted model: the ids that come are the test's own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BOS, EOS, VOCAB, byte_tokenizer, byte_tokenizer_json, request, scripted

from tformer_deploy.errors import InputError
from tformer_deploy.generation import Generator, Request, load_tokenizer
from tformer_deploy.generation.sampling import LogitsError


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
