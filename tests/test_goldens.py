"""Real checkpoints through the whole path, against what other people published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import tformer_deploy
from tformer_deploy.backends import Session


@pytest.fixture(scope="module")
def sessions(shared_models: Path, tmp_path_factory: pytest.TempPathFactory):
    folder, opened = tmp_path_factory.mktemp("goldens"), {}

    def get(name: str) -> Session:
        if name not in opened:
            path = tformer_deploy.export(shared_models / name, folder / f"{name}.bundle", check=False)
            opened[name] = tformer_deploy.open_bundle(path).session()
        return opened[name]

    return get


def greedy(session: Session, rows: list[list[int]], steps: int) -> list[list[int]]:
    rows = [list(r) for r in rows]
    logits = session.prefill(rows)
    for step in range(steps):
        tokens = logits.argmax(-1).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        if step + 1 < steps:
            logits = session.decode(tokens)
    return rows


def test_stories260k_when_decoded_greedily_then_gives_the_200_published_ids(sessions, shared_models):
    golden = json.loads((shared_models / "stories260k" / "golden_llama2c_test_all.json").read_text())["ids"]
    assert len(golden) == 201  # the prompt and 200 generated
    assert greedy(sessions("stories260k"), [[1]], 200) == [golden]


def test_stories260k_when_in_a_batch_of_mixed_lengths_then_every_row_gives_the_published_ids(sessions, shared_models):
    golden = json.loads((shared_models / "stories260k" / "golden_llama2c_test_all.json").read_text())["ids"]
    # Prefixes of the golden itself: each row must go on with it, whatever stands beside it.
    lengths = [1, 7, 2, 61, 23]
    rows = greedy(sessions("stories260k"), [golden[:n] for n in lengths], 140)
    assert [row[:141] for row in rows] == [golden[:141]] * len(lengths)
    assert rows[3] == golden


def test_tiny_random_gpt2_when_every_prefix_is_prefilled_then_gives_the_published_logits(sessions, shared_models):
    golden = json.loads((shared_models / "tiny-random-gpt2-ortgenai" / "golden_ortgenai.json").read_text())
    session = sessions("tiny-random-gpt2-ortgenai")
    for n in range(1, 5):
        logits = session.prefill([row[:n] for row in golden["input_ids"]])
        wanted = np.array([row[n - 1] for row in golden["logits_stride_200_prompt"]])
        assert np.abs(logits[:, ::200] - wanted).max() <= 1e-5
    first = logits.argmax(-1).tolist()
    step2 = np.array(golden["logits_stride_200_step2"])[:, 0]
    assert np.abs(session.decode(first)[:, ::200] - step2).max() <= 1e-5
    assert greedy(session, golden["input_ids"], 6) == golden["greedy_sequences_len10"]


def test_capp_gpt2_when_compared_with_another_exporters_graph_then_agrees_in_prefill_and_ten_cached_steps(
    sessions, shared_models
):
    import onnxruntime

    peer = onnxruntime.InferenceSession(str(shared_models / "capp-gpt2" / "peer_model_with_kv_cache.onnx"))
    session, ids = sessions("capp-gpt2"), [51, 3, 9, 14, 21, 30, 2, 47]
    caches = {i.name: np.zeros((1, 4, 0, 16), np.float32) for i in peer.get_inputs() if i.name.startswith("past")}
    new, length, worst = list(ids), 0, 0.0
    logits = session.prefill([ids])
    for step in range(11):
        positions = np.arange(length, length + len(new))[None]
        feeds = {
            "input_ids": np.array([new]),
            "position_ids": positions,
            "attention_mask": np.ones((1, length + len(new)), np.int64),
        }
        found, *present = peer.run(None, feeds | caches)
        caches, length = dict(zip(caches, present, strict=True)), length + len(new)
        worst = max(worst, float(np.abs(found[0, -1] - logits[0]).max()))
        if step < 10:
            new = [int(found[0, -1].argmax())]
            logits = session.decode(new)
    assert worst <= 1e-4
