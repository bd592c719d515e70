"""The fakes that the backend is tested with, and the driver calls it makes, are those of the real libraries."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
from pathlib import Path

import fake_gpu
import pytest

from tformer_deploy.backends import cuda

trt = pytest.importorskip("tensorrt_rtx")

CLASSES = {
    fake_gpu.FakeRuntime: "Runtime",
    fake_gpu.FakeEngine: "ICudaEngine",
    fake_gpu.FakeContext: "IExecutionContext",
    fake_gpu.FakeRuntimeConfig: "IRuntimeConfig",
    fake_gpu.FakeRuntimeCache: "IRuntimeCache",
    fake_gpu.ILogger: "ILogger",
}
ENUMS = (
    fake_gpu.TensorIOMode, fake_gpu.TensorLocation, fake_gpu.DataType, fake_gpu.ExecutionContextAllocationStrategy,
    fake_gpu.CudaGraphStrategy, fake_gpu.EngineValidity, fake_gpu.EngineInvalidityDiagnostics,
)  # fmt: skip
BACKEND = Path(cuda.__file__).parent / "tensorrt"


def public(kind: type) -> set[str]:
    """What a test could call on a fake: its methods, and the attributes that it sets on itself."""
    source = ast.parse(inspect.getsource(kind))
    assigned = {
        n.attr
        for n in ast.walk(source)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and getattr(n.value, "id", "") == "self"
    }
    return {n for n in {*vars(kind), *assigned} if not n.startswith("_")}


@pytest.mark.parametrize("fake", CLASSES, ids=CLASSES.values())
def test_fake_when_compared_with_the_installed_package_then_has_no_name_of_its_own(fake: type):
    real = getattr(trt, CLASSES[fake])
    assert public(fake)
    assert not {n for n in public(fake) if not hasattr(real, n)}


@pytest.mark.parametrize("fake", CLASSES, ids=CLASSES.values())
def test_fake_when_a_method_is_called_then_the_real_one_takes_as_many_arguments(fake: type):
    real = getattr(trt, CLASSES[fake])
    for name, method in vars(fake).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        text = getattr(real, name).__doc__ or ""
        signatures = re.findall(rf"{name}\((self: [^\n]*)\) ->", text)
        assert signatures, name
        counts = {len(re.findall(r"(?:^|, )\w+: ", signature)) for signature in signatures}
        assert len(inspect.signature(method).parameters) in counts, (name, signatures)


@pytest.mark.parametrize("fake", ENUMS, ids=lambda e: e.__name__)
def test_fake_enumeration_when_compared_then_its_members_are_real_ones(fake: type):
    real = getattr(trt, fake.__name__)
    assert set(fake.__members__) <= set(real.__members__)  # type: ignore[attr-defined]


def test_diagnostics_when_invalid_then_are_bits_as_the_backend_reads_them():
    """``_deserialise`` takes the reasons apart with ``&``."""

    class Logger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)

        def log(self, severity, text):
            pass

    validity, flags = trt.Runtime(Logger()).get_engine_validity(b"x" * 4096)
    assert validity == trt.EngineValidity.INVALID
    names = [n for n, f in trt.EngineInvalidityDiagnostics.__members__.items() if int(f) & int(flags)]
    assert names == ["MALFORMED_ENGINE"]


def test_driver_when_calls_are_made_in_the_source_then_each_has_its_c_types():
    source = Path(cuda.__file__).read_text("utf-8")
    made = set(re.findall(r'\.call\(\s*"(cu\w+)"', source)) | {"cuGetErrorName", "cuGetErrorString"}
    assert made == set(cuda.CALLS)
    assert all(ctypes.sizeof(t) for types in cuda.CALLS.values() for t in types)


def test_backend_when_its_source_is_read_then_neither_torch_nor_a_cuda_package_is_imported():
    for path in [*BACKEND.glob("*.py"), Path(cuda.__file__)]:
        tree = ast.parse(path.read_text("utf-8"))
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {n.split(".")[0] for n in names} & {"torch", "cuda", "tensorrt", "tensorrt_rtx", "onnx", "pycuda"}
