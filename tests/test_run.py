"""Batches of rows through generator, job and the command, on ONNX Runtime."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from tformer_deploy import cli
from tformer_deploy.backends import Session
from tformer_deploy.backends.torch import torch_session
from tformer_deploy.batch.planner import plan
from tformer_deploy.bundle import open_bundle
from tformer_deploy.generation import Generator, Request, SamplingOptions

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def session(llama_bundle: Path) -> Session:
    return open_bundle(llama_bundle).session()


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tformer_deploy.api import export

    return export(ROOT / "samples" / "shakespeare", tmp_path_factory.mktemp("run") / "shakespeare.bundle", check=False)


def requests(n: int, **options: float) -> list[Request]:
    random = np.random.default_rng(3)
    lengths = random.integers(1, 60, n)
    return [
        Request(tuple(random.integers(0, 131, size).tolist()), SamplingOptions(**options), int(random.integers(0, 20)), seed=i)
        for i, size in enumerate(lengths)
    ]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}])
def test_generate_when_rows_run_together_then_equals_each_row_alone(session: Session, options: dict):
    rows = requests(11, **options)
    together = Generator(session, None, [7, 9]).generate(rows, max_batch=4)
    alone = [Generator(session, None, [7, 9]).generate([r])[0] for r in rows]
    assert together == alone
    assert any(len(c.output_ids) for c in together)


def test_generate_when_run_by_the_reference_then_gives_the_same_greedy_ids(session: Session, llama_checkpoint: Path):
    rows = requests(5)
    reference = Generator(torch_session(llama_checkpoint), None, []).generate(rows)
    assert Generator(session, None, []).generate(rows, max_batch=3) == reference


def test_generate_when_a_row_ends_with_eos_then_the_id_is_kept_and_the_reason_is_stop(session: Session):
    ids = Generator(session, None, []).generate([Request((1, 2, 3), max_new_tokens=6)])[0].output_ids
    ended = Generator(session, None, [ids[2]]).generate([Request((1, 2, 3), max_new_tokens=6)])[0]
    first = ids.index(ids[2])
    assert (ended.output_ids, ended.finish_reason) == (ids[: first + 1], "stop")


@pytest.mark.parametrize(("length", "new"), [(256, 0), (255, 1), (254, 2)])
def test_generate_when_the_prompt_nears_max_length_then_ends_by_length(session: Session, length: int, new: int):
    done = Generator(session, None, []).generate([Request(tuple([5] * length), max_new_tokens=2)])[0]
    assert (len(done.output_ids), done.finish_reason) == (new, "length")


def test_plan_when_lengths_are_mixed_then_buckets_hold_like_lengths_and_every_row_once():
    buckets = plan([5, 300, 64, 65, 1, 9000], (64, 128, 512))
    assert buckets == [[4, 0, 2], [3], [1], [5]]


def test_run_when_rows_are_good_and_bad_then_each_has_one_result_in_order(shakespeare: Path, tmp_path: Path, capsys):
    lines = [
        json.dumps({"id": "a", "prompt": "ROMEO:", "max_new_tokens": 5}).encode(),
        b"{not json",
        json.dumps({"id": 7, "input_ids": [1, 2, 3], "max_new_tokens": 0}).encode(),
        b"",
        json.dumps({"id": "c", "prompt": ""}).encode(),
        json.dumps({"id": "d", "prompt": "x" * 5000}).encode(),
        b'{"id": "e", "prompt": "\xff"}',
        json.dumps({"id": "f", "input_ids": [5000]}).encode(),
        json.dumps({"prompt": "line\u2028separator", "max_new_tokens": 2}, ensure_ascii=False).encode(),
        b'{"id": "g", "prompt": "\\ud800"}',
        json.dumps({"id": "h", "prompt": "JULIET:", "temperature": -1}).encode(),
        json.dumps({"id": "i"}).encode(),
        json.dumps({"id": "j", "prompt": "JULIET:", "temperature": 1.0, "seed": 5, "stop": ["e"], "top_k": 10**9}).encode(),
    ]
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert cli.run(["run", str(shakespeare), str(prompts), "-o", str(output)]) == 1
    rows = [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
    assert [r["id"] for r in rows] == ["a", 2, 7, "c", "d", 7, "f", 9, "g", "h", "i", "j"]
    codes = {r["line"]: r["error"]["code"] for r in rows if "error" in r}
    assert codes == {
        2: "invalid_json",
        5: "empty_prompt",
        6: "prompt_too_long",
        7: "invalid_utf8",
        8: "token_out_of_range",
        10: "invalid_field",
        11: "invalid_field",
        12: "missing_prompt",
    }
    assert set(rows[0]) == {"id", "text", "output_ids", "finish_reason", "prompt_tokens", "completion_tokens"}
    assert rows[0]["completion_tokens"] == len(rows[0]["output_ids"]) == 5
    assert (rows[2]["text"], rows[2]["output_ids"], rows[2]["finish_reason"]) == ("", [], "length")
    assert "e" not in rows[-1]["text"]
    assert rows[-1]["finish_reason"] == "stop"
    assert "8 failed" in capsys.readouterr().err
    assert cli.run(["run", str(shakespeare), str(prompts), "-o", str(output), "--force", "--allow-errors"]) == 0


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"\xff\xfe{\x00", "UTF-16"),
        (b"\x1f\x8b\x08", "gzip"),
        (b'{"id":1,"prompt":"a"}\n{"id":"1","prompt":"b"}\n', "Lines 1 and 2"),
    ],
)
def test_run_when_the_file_as_a_whole_is_bad_then_exits_3_naming_why(
    shakespeare: Path, tmp_path: Path, capsys, data: bytes, word: str
):
    (tmp_path / "p.jsonl").write_bytes(data)
    assert cli.run(["run", str(shakespeare), str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl")]) == 3
    assert word in capsys.readouterr().err
    assert not (tmp_path / "o.jsonl").exists()


def test_run_when_the_output_exists_or_is_the_input_then_exits_2_and_touches_nothing(shakespeare: Path, tmp_path: Path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    output.write_text("old")
    assert cli.run(["run", str(shakespeare), str(prompts), "-o", str(output)]) == 2
    assert cli.run(["run", str(shakespeare), str(prompts), "-o", str(prompts), "--force"]) == 2
    (tmp_path / "link").symlink_to(output)
    assert cli.run(["run", str(shakespeare), str(prompts), "-o", str(tmp_path / "link"), "--force"]) == 2
    assert output.read_text() == "old"


def test_run_when_the_file_is_empty_then_gives_no_rows_and_exits_0(shakespeare: Path, tmp_path: Path):
    (tmp_path / "p.jsonl").write_bytes(b"\n\n")
    assert cli.run(["run", str(shakespeare), str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl")]) == 0
    assert (tmp_path / "o.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    "flags", [["--temperature", "-1"], ["--top-p", "1.5"], ["--seed", "-1"], ["--stop", ""], ["--max-batch", "0"]]
)
def test_generate_command_when_a_flag_is_out_of_range_then_exits_2(shakespeare: Path, tmp_path: Path, flags: list[str]):
    (tmp_path / "p.jsonl").write_text("")
    assert cli.run(["run", str(shakespeare), str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl"), *flags]) == 2


def test_generate_command_when_streamed_then_equals_run(shakespeare: Path, tmp_path: Path, capsys):
    assert cli.run(["generate", str(shakespeare), "ROMEO:", "--max-new-tokens", "20", "--stop", "\n"]) == 0
    streamed = capsys.readouterr().out
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "ROMEO:", "max_new_tokens": 20, "stop": "\n"}))
    assert cli.run(["run", str(shakespeare), str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl")]) == 0
    assert streamed == json.loads((tmp_path / "o.jsonl").read_text())["text"] + "\n"


def test_generate_command_when_the_tensorrt_backend_is_asked_for_then_exits_4_and_runs_nothing_else(shakespeare: Path, capsys):
    assert cli.run(["generate", str(shakespeare), "ROMEO:", "--backend", "tensorrt"]) == 4
    assert capsys.readouterr().out == ""


def test_cache_when_bound_as_past_and_present_then_is_updated_in_place(llama_bundle: Path, capfd):
    """ONNX Runtime warns for every cache that it copies; the backend's own logging is turned up to see it."""
    import onnxruntime

    def copies(share: bool) -> int:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 2
        decode = onnxruntime.InferenceSession(str(llama_bundle / "decode.onnx"), options, providers=["CPUExecutionProvider"])
        backend = open_bundle(llama_bundle).session(profile="portable").backend
        backend._graph("decode")._session = decode  # type: ignore[attr-defined]
        cache = backend.allocate(2, 32)
        if not share:
            feeds = {"input_ids": np.array([[1], [2]]), "past_lengths": np.array([3, 4]), "logit_positions": np.array([[0], [0]])}
            names = [i.name for i in decode.get_inputs() if i.name.startswith("past_key")]
            decode.run(None, feeds | dict(zip(names, cache.arrays, strict=True)))  # type: ignore[attr-defined]
        else:
            backend.decode(np.array([[1], [2]]), np.array([3, 4]), np.array([[0], [0]]), cache)
        return capfd.readouterr().err.count("in-place optimization not activated")

    assert copies(share=True) == 0
    assert copies(share=False) == 6


@pytest.mark.parametrize(
    ("template", "code"),
    [("{{ ''.__class__.__mro__ }}", 3), ("{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}", 6),
     ("{{ 'a' * 10**10 }}", 6), ("{% if %}", 3), ("{{ raise_exception('no system role') }}", 3)],
)  # fmt: skip
def test_chat_template_when_hostile_then_is_stopped(template: str, code: int):
    from tformer_deploy.errors import TformerError
    from tformer_deploy.generation.chat import render

    with pytest.raises(TformerError) as caught:
        render(template, [{"role": "user", "content": "hi"}], "", "")
    assert caught.value.exit_code == code


def test_chat_template_when_it_loops_without_end_then_the_limit_ends_it(monkeypatch):
    from tformer_deploy.errors import ResourceError
    from tformer_deploy.generation.chat import render

    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ResourceError):
        render(loop, [], "", "")


def test_rows_when_read_from_a_stream_then_blank_lines_do_not_count_as_rows(llama_bundle: Path):
    from tformer_deploy.batch.rows import Defaults, read_rows

    manifest = open_bundle(llama_bundle).manifest
    file = io.BytesIO(b'\n{"input_ids": [1]}\n')
    (row,) = read_rows(file, manifest.config, 256, None, Defaults(SamplingOptions(), 4, (), 0))
    assert (row.line, row.id) == (2, 2)


def test_completion_when_it_ends_at_max_length_then_that_is_said_once(shakespeare: Path, tmp_path: Path, capsys):
    limit = open_bundle(shakespeare).manifest.max_length
    words = f"prompt and completion together have room for {limit}"
    assert cli.run(["generate", str(shakespeare), "R" * (limit - 8), "--max-new-tokens", "100000"]) == 0
    assert words in capsys.readouterr().err
    assert cli.run(["generate", str(shakespeare), "R" * (limit - 8), "--max-new-tokens", "1"]) == 0
    assert words not in capsys.readouterr().err
    rows = [{"input_ids": [5] * (limit - 2)}, {"input_ids": [5] * (limit - 1)}, {"input_ids": [5], "max_new_tokens": 1}]
    (tmp_path / "p").write_text("\n".join(map(json.dumps, rows)))
    assert cli.run(["run", str(shakespeare), str(tmp_path / "p"), "-o", str(tmp_path / "o"), "--max-new-tokens", "100000"]) == 0
    (note,) = [line for line in capsys.readouterr().err.splitlines() if words in line]
    assert note.startswith("Note: 2 rows ended before")
