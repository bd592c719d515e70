"""The C++ sample: built from its sources, run on real bundles and on hostile ones."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from manifest_corpus import EDITS, TEXTS

from tformer_deploy.api import export
from tformer_deploy.bundle import open_bundle

SOURCES = Path(__file__).resolve().parent.parent / "samples" / "cpp"
REQUIRED = os.environ.get("TFORMER_REQUIRE_CPP") == "1"


def _unavailable(reason: str) -> None:
    if REQUIRED:
        pytest.fail(f"TFORMER_REQUIRE_CPP is set, but {reason}")
    pytest.skip(reason)


def _headers(folder: Path) -> str:
    """A CMake setting that names ONNX Runtime's headers: the environment's, else fetched ones."""
    for name in ("ONNXRUNTIME_INCLUDE_DIR", "ONNXRUNTIME_ROOT"):
        if os.environ.get(name):
            return f"-D{name}={os.environ[name]}"
    fetched = subprocess.run([SOURCES / "fetch_headers.sh", folder], capture_output=True, text=True, timeout=300)
    if fetched.returncode:
        _unavailable(f"ONNX Runtime's headers cannot be had: {fetched.stderr.strip()[-500:]}")
    return f"-DONNXRUNTIME_INCLUDE_DIR={fetched.stdout.strip()}"


@pytest.fixture(scope="session")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, warnings being errors."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            _unavailable(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("cpp")
    command = ["cmake", "-S", SOURCES, "-B", folder / "build", _headers(folder / "headers")]
    configured = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if configured.returncode:
        missing = [line for line in configured.stderr.splitlines() if "Could not find" in line or "Could NOT find" in line]
        assert missing, configured.stderr
        _unavailable(f"a library is missing: {missing[0].strip()}")
    built = subprocess.run(["cmake", "--build", folder / "build"], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "greedy"


@pytest.fixture(scope="session")
def library() -> Path:
    """The shared library of the onnxruntime that Python uses."""
    spec = importlib.util.find_spec("onnxruntime")
    assert spec is not None
    assert spec.submodule_search_locations
    (found,) = (Path(spec.submodule_search_locations[0]) / "capi").glob("libonnxruntime.so.*")
    return found


@pytest.fixture(scope="session")
def run(greedy: Path, library: Path):
    def call(bundle: Path, *flags: str, ids: str = "1", ort: Path | str = library) -> subprocess.CompletedProcess[str]:
        command = [greedy, bundle, "--ids", ids, "--threads", "1", "--onnxruntime", ort, *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return call


@pytest.fixture(scope="session", params=["fp32", "fp16"])
def stories(request, shared_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cpp-bundles") / request.param
    return export(shared_models / "stories260k", path, dtype=request.param, check=False)


@pytest.fixture
def broken(llama_bundle: Path, tmp_path: Path) -> Path:
    """A copy of a good bundle, for one fault."""
    return Path(shutil.copytree(llama_bundle, tmp_path / "bundle"))


def edit_manifest(bundle: Path, edit) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def refused(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert (result.returncode, result.stdout) == (code, ""), result
    assert all(word in result.stderr for word in words), result.stderr


def test_program_when_counted_then_has_at_most_300_lines():
    assert len((SOURCES / "main.cpp").read_text().splitlines()) <= 300


def test_greedy_when_stories260k_then_the_200_published_ids_and_no_cache_copied(run, stories, shared_models):
    golden = json.loads((shared_models / "stories260k" / "golden_llama2c_test_all.json").read_text())["ids"]
    result = run(stories, "--max-new-tokens", "200")
    assert result.returncode == 0, result.stderr
    assert [1, *map(int, result.stdout.split())] == golden
    assert len(golden) == 201
    assert result.stdout.count("\n") == 1
    assert result.stderr == "cache copies: 0\n"


def test_greedy_when_the_prompt_is_longer_then_the_golden_goes_on(run, stories, shared_models):
    golden = json.loads((shared_models / "stories260k" / "golden_llama2c_test_all.json").read_text())["ids"]
    result = run(stories, "--max-new-tokens", "20", ids=",".join(map(str, golden[:61])))
    assert list(map(int, result.stdout.split())) == golden[61:81]
    assert result.returncode == 0


@pytest.mark.parametrize("name", ["llama_bundle", "gpt2_bundle"])
def test_greedy_when_weights_are_hot_then_the_ids_that_python_gives(run, request, name):
    bundle, ids = request.getfixturevalue(name), [5, 99, 1, 130, 42, 7]
    session = open_bundle(bundle).session(threads=1)
    logits, wanted = session.prefill([ids]), []
    for _ in range(40):
        wanted.append(int(logits[0].argmax()))
        logits = session.decode(wanted[-1:])
    result = run(bundle, "--max-new-tokens", "40", ids=",".join(map(str, ids)))
    assert list(map(int, result.stdout.split())) == wanted
    assert len(set(wanted)) > 5  # not one token over and over
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", ["int8", "int4", "int8-dynamic"])
def test_greedy_when_weights_are_quantised_then_the_ids_that_python_gives(run, llama_checkpoint, tmp_path, kind):
    bundle, ids = export(llama_checkpoint, tmp_path / "b", quantize=kind, check=False), [5, 99, 1, 130, 42, 7]
    session = open_bundle(bundle).session(threads=1, profile="portable")
    logits, wanted = session.prefill([ids]), []
    for _ in range(20):
        wanted.append(int(logits[0].argmax()))
        logits = session.decode(wanted[-1:])
    result = run(bundle, "--max-new-tokens", "20", ids=",".join(map(str, ids)))
    assert list(map(int, result.stdout.split())) == wanted
    assert result.stderr == "cache copies: 0\n"


def test_greedy_when_past_and_present_are_apart_then_the_copies_are_counted_and_it_fails(run, stories):
    good, copied = (run(stories, "--max-new-tokens", "5", "--copy-caches", flag) for flag in "01")
    assert copied.returncode == 1
    assert copied.stdout == good.stdout  # right all the same
    layers = json.loads((stories / "manifest.json").read_text())["config"]["n_layers"]
    assert copied.stderr == f"cache copies: {5 * 2 * layers}\n"


def test_greedy_when_an_id_ends_the_text_then_it_is_the_last_one(run, broken):
    first = run(broken, "--max-new-tokens", "6").stdout.split()
    edit_manifest(broken, lambda m: m.update(eos_token_ids=[int(first[2])]))
    result = run(broken, "--max-new-tokens", "6")
    assert result.stdout.split() == first[: first.index(first[2]) + 1]


def test_greedy_when_max_length_is_reached_then_it_stops(run, broken):
    edit_manifest(broken, lambda m: m.update(max_length=9, eos_token_ids=[]))
    assert len(run(broken, ids="1,2,3").stdout.split()) == 6
    refused(run(broken, ids=",".join("1" * 9)), 2, "9 ids")


@pytest.mark.parametrize("name", ["weights.bin", "prefill.onnx", "decode.onnx"])
def test_greedy_when_a_bit_is_flipped_then_the_file_is_named(run, broken, name):
    data = bytearray((broken / name).read_bytes())
    data[len(data) // 2] ^= 1
    (broken / name).write_bytes(data)
    refused(run(broken), 3, f"{broken / name} has sha256")


@pytest.mark.parametrize("change", [-1, 1])
def test_greedy_when_a_file_has_another_size_then_it_is_named(run, broken, change):
    data = (broken / "weights.bin").read_bytes()
    (broken / "weights.bin").write_bytes(data + b"\0" if change > 0 else data[:-1])
    refused(run(broken), 3, f"{broken / 'weights.bin'} has", "bytes")


@pytest.mark.parametrize("kind", ["missing", "symlink", "hard link", "fifo", "folder"])
def test_greedy_when_a_file_is_no_plain_file_then_it_is_named(run, broken, tmp_path, kind):
    path, aside = broken / "weights.bin", tmp_path / "aside"
    path.rename(aside)
    if kind == "symlink":
        path.symlink_to(aside)
    elif kind == "hard link":
        path.hardlink_to(aside)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    refused(run(broken), 3, str(path))


RECORD = {"sha256": "0" * 64, "size": 1}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        *((lambda m, n=n: m["files"].update({n: RECORD}), ("no plain file name",))
          for n in ("../x", "/etc/passwd", "a/b", "..", "", "C:x", "a\0b", "manifest.json", "a" * 5000)),
        (lambda m: m["files"]["weights.bin"].update(size=-1), ("weights.bin", "size is -1")),
        (lambda m: m["files"]["weights.bin"].update(size=2**63), ("weights.bin", "size is 9223372036854775808")),
        (lambda m: m["files"]["weights.bin"].update(size=1e3), ("weights.bin", "size is 1000.0")),
        (lambda m: m["files"]["weights.bin"].update(size="1"), ("weights.bin", 'size is "1"')),
        (lambda m: m["files"]["weights.bin"].update(sha256="0"), ("weights.bin", "sha256")),
        (lambda m: m["files"]["weights.bin"].update(extra=1), ("unknown field", "extra")),
        (lambda m: m["files"].pop("weights.bin"), ("files lacks weights.bin",)),
        (lambda m: m.update(files=[]), ("files is no object",)),
        (lambda m: m.update(schema=3), ("schema is 3", 'made by tformer-deploy "0.')),
        (lambda m: m.update(schema=3, versions=[]), ("schema is 3", "null")),
        (lambda m: m.update(schema=3, later="field"), ("schema is 3",)),
        (lambda m: m.update(schema=2), ("lacks the field quantization",)),
        (lambda m: m.update(quantization={"kind": "int8"}), ("unknown field", "quantization")),
        (lambda m: m.update(schema=0), ("schema is 0",)),
        (lambda m: m.pop("schema"), ("schema is null",)),
        (lambda m: m.update(extra=1), ("unknown field", "extra")),
        (lambda m: m.update(dtype="int4"), ("dtype",)),
        (lambda m: m.update(max_length=10**6), ("max_length",)),
        (lambda m: m.update(eos_token_ids=[131]), ("eos_token_ids is 131",)),
        (lambda m: m.update(eos_token_ids=7), ("eos_token_ids",)),
        (lambda m: m["config"].update(head_dim=10**9), ("config.head_dim",)),
        (lambda m: m["config"].update(head_dim=10**6), ("more weights",)),
        (lambda m: m["config"].update(n_layers=-3), ("config.n_layers is -3",)),
        (lambda m: m["config"].update(n_layers=2), ("prefill.onnx",)),
        (lambda m: m["config"].pop("vocab_size"), ("config.vocab_size is null",)),
    ],
)  # fmt: skip
def test_greedy_when_the_manifest_is_hostile_then_it_is_refused(run, broken, edit, words):
    edit_manifest(broken, edit)
    refused(run(broken), 3, *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no JSON at byte",)),
        ("[]", ("no object",)),
        ("{", ("no JSON at byte",)),
        ('{"schema": 1, "schema": 1}', ('"schema"', "twice")),
        ('{"schema": NaN}', ("no JSON at byte",)),
        ('{"schema": 1e400}', ("no float holds",)),
        ('{"a": "\xff"}', ("no JSON at byte",)),
        ("[" * 1_000_000, ("nested",)),
    ],
)
def test_greedy_when_the_manifest_is_no_proper_json_then_it_is_refused(run, broken, text, words):
    (broken / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(run(broken), 3, "manifest.json", *words)


@pytest.mark.parametrize("case", EDITS)
def test_greedy_when_the_manifest_lies_as_in_the_shared_corpus_then_it_is_refused_as_by_python(run, broken, case):
    edit, word = EDITS[case]
    edit_manifest(broken, edit)
    refused(run(broken), 3, word)


@pytest.mark.parametrize("case", TEXTS)
def test_greedy_when_the_manifest_is_a_text_of_the_shared_corpus_then_it_is_refused_as_by_python(run, broken, case):
    (broken / "manifest.json").write_bytes(TEXTS[case])
    refused(run(broken), 3, "manifest.json")


def test_greedy_when_no_bundle_then_it_is_named(run, tmp_path):
    refused(run(tmp_path / "nothing"), 3, str(tmp_path / "nothing" / "manifest.json"))


@pytest.mark.parametrize(
    "flags",
    [["--ids", "1,x"], ["--ids", "1,,2"], ["--ids", "131"], ["--ids", "-1"], ["--ids", ""], ["--max-new-tokens", "0"],
     ["--max-new-tokens", "99999999999999999999"], ["--threads", "x"], ["--unknown", "1"], ["--threads"]],
)  # fmt: skip
def test_greedy_when_an_argument_is_wrong_then_usage(run, llama_bundle, flags):
    refused(run(llama_bundle, *flags), 2, flags[0])


def test_greedy_when_onnxruntime_is_absent_then_the_environment_is_blamed(run, llama_bundle, tmp_path):
    refused(run(llama_bundle, ort=tmp_path / "absent.so"), 4, "absent.so", "--onnxruntime")
    refused(run(llama_bundle, ort="libdl.so.2"), 4, "not ONNX Runtime")


def test_greedy_when_the_bundle_is_bf16_then_the_environment_is_blamed(run, broken):
    edit_manifest(broken, lambda m: m.update(dtype="bf16"))
    refused(run(broken), 4, "bf16")


def test_greedy_when_the_output_cannot_be_written_then_io_is_blamed(greedy, library, llama_bundle):
    with open("/dev/full", "w") as full:
        command = [greedy, llama_bundle, "--ids", "1", "--max-new-tokens", "2", "--onnxruntime", library]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert result.returncode == 5
