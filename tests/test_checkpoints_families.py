"""Checkpoints as transformers writes them: shards, dtypes, spellings, names; and goldens that others published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import hot_model

from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.reference import Decoder

transformers = pytest.importorskip("transformers")

SEQUENCE = 48
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def difference(model: torch.nn.Module, path: Path) -> float:
    """Largest difference of logits over two full sequences, by the model in memory and the Decoder of the folder."""
    ids = torch.randint(0, 131, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    decoder = Decoder.from_pretrained(path)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return float((decoder(ids) - expected).abs().max())


def test_logits_when_one_weight_is_changed_then_differ(tmp_path: Path):
    model = hot_model("llama")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3] *= -1
    assert difference(model, tmp_path) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_tensors_when_saved_in_shards_then_equal_the_single_file(kind: str, tmp_path: Path):
    model = hot_model(kind)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert list(one.tensors) == list(many.tensors)
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.tensors)
    assert one.sha256() != many.sha256()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_when_stored_in_16_bits_then_are_exactly_those_values(dtype: str, tmp_path: Path):
    model = hot_model("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "low")
    model.float().save_pretrained(tmp_path / "high")
    low, high = open_checkpoint(tmp_path / "low"), open_checkpoint(tmp_path / "high")
    assert {spec.dtype for spec in low.tensors.values()} == {{"float16": "fp16", "bfloat16": "bf16"}[dtype]}
    for name in low.tensors:
        assert torch.equal(low.read(name).float(), high.read(name))
        assert torch.equal(low.read(name, torch.float32), high.read(name))


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text("utf-8"))
    for key, value in changes.items():
        config.pop(key) if value is KeyError else config.update({key: value})
    (path / "config.json").write_text(json.dumps(config), "utf-8")


SPELLINGS = {
    "new": {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}},
    "old, rope_type": {"rope_parameters": KeyError, "rope_theta": 10000, "rope_scaling": LLAMA3},
    "old, type": {
        "rope_parameters": KeyError, "rope_theta": 10000.0,
        "rope_scaling": {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()},
    },
    "old, both": {"rope_parameters": KeyError, "rope_theta": 1e4, "rope_scaling": LLAMA3 | {"type": "llama3"}},
    "old and new": {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}, "rope_theta": 10000.0, "rope_scaling": LLAMA3},
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_when_spelled_in_any_way_then_is_the_same(spelling: str, tmp_path: Path):
    model = hot_model("llama", rope_parameters=LLAMA3 | {"rope_theta": 10000.0})
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, **SPELLINGS[spelling])
    assert difference(model, tmp_path) < 1e-4


def test_names_when_without_the_prefix_then_are_the_same_model(tmp_path: Path):
    for kind, inner in (("llama", "model"), ("gpt2", "transformer")):
        model = hot_model(kind, tie_word_embeddings=True)
        getattr(model, inner).save_pretrained(tmp_path / kind)
        assert difference(model, tmp_path / kind) < 1e-4


def test_stories260k_when_decoded_greedily_then_gives_the_200_golden_ids(shared_models: Path):
    golden = json.loads((shared_models / "stories260k" / "golden_llama2c_test_all.json").read_text("utf-8"))
    decoder = Decoder.from_pretrained(shared_models / "stories260k")
    ids = torch.tensor([golden["prompt_ids"]])
    with torch.no_grad():
        for _ in range(len(golden["ids"]) - 1):
            ids = torch.cat((ids, decoder(ids)[:, -1:].argmax(-1)), dim=1)
    assert len(golden["ids"]) == 201
    assert ids[0].tolist() == golden["ids"]


def test_tiny_random_gpt2_when_run_then_gives_the_published_logits(shared_models: Path):
    path = shared_models / "tiny-random-gpt2-ortgenai"
    golden = json.loads((path / "golden_ortgenai.json").read_text("utf-8"))
    decoder = Decoder.from_pretrained(path)
    with torch.no_grad():
        logits = decoder(torch.tensor(golden["input_ids"]))[:, :, ::200]
    assert float((logits - torch.tensor(golden["logits_stride_200_prompt"])).abs().max()) < 1e-5
