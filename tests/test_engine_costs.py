"""What an engine costs and which prompt buckets it gets: plain arithmetic, before anything is built. No TensorRT is needed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import LLAMA_LIKE

from tformer_deploy.bundle import Manifest, open_bundle
from tformer_deploy.bundle.quantization import Quantization
from tformer_deploy.errors import InputError, ResourceError, StorageError
from tformer_deploy.exporters.tensorrt import costs as costs_module
from tformer_deploy.exporters.tensorrt.buckets import buckets_for, read_lengths
from tformer_deploy.exporters.tensorrt.costs import (
    PROFILE_BYTES,
    QUANTISED_PROFILE_BYTES,
    Room,
    available_memory,
    estimate,
    require_room,
    room_sentence,
)
from tformer_deploy.exporters.tensorrt.preflight import make_plan


@pytest.fixture(scope="module")
def manifest(llama_bundle: Path) -> Manifest:
    found = open_bundle(llama_bundle).manifest
    return dataclasses.replace(found, dtype="fp16", config=dataclasses.replace(found.config, vocab_size=136))


# Embedding, three layers of (norms, q k v o, gate up down), last norm; float16. The rotary frequencies are float32.
WEIGHTS = 2 * (136 * 64 + 3 * (2 * 64 + 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 64) + 4 * 8


def test_costs_when_one_plan_serves_both_phases_then_weights_count_once(manifest: Manifest):
    costs = estimate(make_plan(manifest, "fp16", 100, 8, (16, 64)), manifest)
    assert costs.weights == WEIGHTS
    assert costs.plans == WEIGHTS + 3 * PROFILE_BYTES
    assert costs.cache_row == 2 * 3 * 2 * 16 * 2 * 100
    assert costs.cache_batch == 8 * costs.cache_row
    assert costs.disk == costs.plans


def test_costs_when_split_then_weights_count_twice_and_so_is_said(manifest: Manifest):
    costs = estimate(make_plan(manifest, "fp16", 100, 8, (64,), "split"), manifest)
    assert costs.plans == 2 * WEIGHTS + 3 * PROFILE_BYTES
    assert "in each of 2 plans" in costs.sentences[0]


def test_costs_when_a_tied_table_cannot_be_padded_then_it_counts_twice(manifest: Manifest, monkeypatch):
    odd = dataclasses.replace(manifest, config=dataclasses.replace(manifest.config, vocab_size=131))
    plan, table = make_plan(odd, "fp16", 100, 8, ()), 2 * 64 * 131
    assert estimate(plan, odd).weights == WEIGHTS + table - 2 * 64 * 136
    monkeypatch.setattr("tformer_deploy.exporters.tensorrt.costs._LARGEST_PADDED", 4 * 64 * 131 - 1)
    assert estimate(plan, odd).weights == WEIGHTS + 2 * table - 2 * 64 * 136


def test_costs_when_fp8_then_matrices_of_blocks_take_a_byte_and_the_head_does_not(manifest: Manifest):
    stored = dataclasses.replace(manifest, dtype="fp32")
    plain, rounded = (estimate(make_plan(stored, "fp16", 100, 8, (), fp8=on), stored) for on in (False, True))
    config = stored.config
    outputs = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim + config.d_model + 2 * config.d_ff + config.d_model
    elements = 2 * config.n_heads * config.head_dim * config.d_model + 2 * config.n_kv_heads * config.head_dim * config.d_model
    elements += 3 * config.d_model * config.d_ff
    assert plain.weights - rounded.weights == config.n_layers * (elements - 2 * outputs)
    assert rounded.host == plain.host  # the builder reads the matrices before it rounds them


def test_costs_when_another_dtype_is_derived_then_its_graphs_take_disk_too(manifest: Manifest):
    stored = dataclasses.replace(manifest, dtype="fp32")
    costs = estimate(make_plan(stored, "fp16", 100, 8, ()), stored)
    assert costs.disk == costs.plans + WEIGHTS


def test_costs_when_weights_are_int4_then_they_count_packed(manifest: Manifest):
    quantised = dataclasses.replace(manifest, quantization=Quantization("int4", "int8", 32))
    costs = estimate(make_plan(quantised, "fp16", 100, 8, ()), quantised)
    matrices = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert costs.weights < WEIGHTS - matrices
    assert costs.plans == costs.weights + 2 * QUANTISED_PROFILE_BYTES


@pytest.mark.parametrize(
    ("weights", "quantised", "peak_mib"), [(256.6, False, 1294), (942.3, False, 3329), (121.8, True, 989), (0.2, False, 268)]
)
def test_memory_when_estimated_then_is_at_least_what_builders_took_and_not_far_above(
    manifest: Manifest, weights: float, quantised: bool, peak_mib: int, monkeypatch: pytest.MonkeyPatch
):
    """Peaks measured with tensorrt-rtx 1.7.1.116: SmolLM2 and a model of 0.5 billion in fp16, SmolLM2 in int4, a tiny one."""
    monkeypatch.setattr(costs_module, "stored_size", lambda shape, dtype: int(weights * 2**20) if dtype == "once" else 0)
    monkeypatch.setattr(costs_module, "stored_tensors", lambda *_: {"embedding.weight": ((1,), "once")})
    changed = dataclasses.replace(manifest, quantization=Quantization("int4", "int8", 32) if quantised else None)
    host = estimate(make_plan(changed, "fp16", 100, 8, ()), changed).host / 2**20
    assert peak_mib <= host <= 1.3 * peak_mib


def test_room_when_memory_or_disk_is_short_then_is_refused_with_both_numbers_and_a_next_step(manifest: Manifest):
    costs = estimate(make_plan(manifest, "fp16", 100, 8, ()), manifest)
    require_room(costs, Room(costs.host, costs.disk))
    require_room(costs, Room(None, None))
    with pytest.raises(ResourceError, match=r"about .* MiB of memory .* 0\.5 MiB are available") as e:
        require_room(costs, Room(2**19, None))
    assert e.value.exit_code == 6
    assert e.value.hint
    with pytest.raises(StorageError, match=r"of disk; 0\.0 MiB are free") as f:
        require_room(costs, Room(None, 1))
    assert f.value.exit_code == 5
    assert "an unknown amount available" in room_sentence(costs, Room(None, 5))


def proc(folder: Path, available_kib: int, group: str = "0::/") -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {available_kib} kB\n")
    (folder / "self/cgroup").write_text(f"{group}\n")
    return folder


def limits(
    folder: Path, limit: str, used: int, cache: int = 0, names: tuple[str, str] = ("memory.max", "memory.current")
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_memory_when_nothing_limits_it_then_is_what_the_machine_has(tmp_path: Path):
    limits(tmp_path / "cgroup", "max", 10)
    assert available_memory(proc(tmp_path / "proc", 4), tmp_path / "cgroup") == 4096


def test_memory_when_a_group_above_limits_it_then_the_least_counts_and_dropable_files_are_free(tmp_path: Path):
    limits(tmp_path / "cgroup", "2000", 1500, cache=300)
    limits(tmp_path / "cgroup/a", "5000", 100)
    limits(tmp_path / "cgroup/a/b", "max", 100)
    assert available_memory(proc(tmp_path / "proc", 4, "0::/a/b"), tmp_path / "cgroup") == 800


def test_memory_when_the_group_is_of_the_older_version_then_is_read_too(tmp_path: Path):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limits(tmp_path / "cgroup/memory/docker", "3000", 1000, names=names)
    limits(tmp_path / "cgroup/memory", str(2**63 - 4096), 1000, names=names)
    assert available_memory(proc(tmp_path / "proc", 4, "5:memory:/docker"), tmp_path / "cgroup") == 2000


def test_memory_when_the_system_says_nothing_then_is_unknown(tmp_path: Path):
    assert available_memory(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("lengths", "capacity", "edges"),
    [
        ([1], 4096, (64,)),
        ([64], 4096, (64,)),
        ([65], 4096, (128,)),
        ([10] * 9 + [1000], 4096, (64, 1024)),
        ([10] * 5 + [200] * 4 + [700], 4096, (64, 256, 768)),
        ([513], 4096, (640,)),
        ([512], 4096, (512,)),
        ([90], 100, (100,)),
        (list(range(1, 101)), 4096, (64, 128)),
    ],
)
def test_buckets_when_derived_then_hold_half_nine_tenths_and_all(lengths: list[int], capacity: int, edges: tuple[int, ...]):
    assert buckets_for(lengths, capacity) == buckets_for(lengths[::-1], capacity) == edges


def test_buckets_when_a_prompt_is_longer_than_the_capacity_then_is_refused_with_the_count():
    with pytest.raises(InputError, match="2 of 3 prompts are longer than the capacity, 128; the longest has 300") as e:
        buckets_for([5, 200, 300], 128)
    assert "--capacity 301" in (e.value.hint or "")
    with pytest.raises(InputError, match="no length"):
        buckets_for([], 128)


def test_lengths_when_read_then_are_numbers_or_fields_of_objects(tmp_path: Path):
    path = tmp_path / "lengths"
    path.write_text('12\n\n{"id": 1, "prompt_tokens": 7}\n{"length": 9}\n{"input_ids": [1, 2, 3]}\n')
    assert read_lengths(path) == [12, 7, 9, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5\nten\n", "line 2: ten is no length"),
        ("-5\n", "line 1"),
        ("0\n", "line 1"),
        ("1.5\n", "line 1"),
        ("9" * 5000, "line 1"),
        ('{"prompt": "text"}\n', "line 1"),
        ('{"length": true}\n', "line 1"),
        ('{"length": 5', "line 1"),
        ("", "holds none"),
    ],
)
def test_lengths_when_a_line_is_none_then_is_refused_by_number(tmp_path: Path, text: str, words: str):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(InputError, match=words):
        read_lengths(tmp_path / "lengths")


def test_lengths_when_the_file_is_absent_then_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="is no file"):
        read_lengths(tmp_path / "absent")


def test_plan_when_the_config_is_the_bundles_then_is_the_one_of_the_tests(manifest: Manifest):
    assert dataclasses.replace(manifest.config, vocab_size=131) == LLAMA_LIKE
