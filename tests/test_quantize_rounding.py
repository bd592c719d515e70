"""Matrices on few levels: rounding, scales, packing, and rounding that knows what reaches the matrix."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tformer_deploy.bundle.bundle import _unpacked
from tformer_deploy.bundle.quantization import block_for, padded
from tformer_deploy.quantization import rounding
from tformer_deploy.quantization.gptq import quantize_with
from tformer_deploy.quantization.rounding import LEVELS, Quantized, find_scales, pack_int4, quantize

KINDS = ("int8", "int4")


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)) * 0.1


@pytest.mark.parametrize(
    ("width", "largest", "block"),
    [(896, 128, 128), (4864, 128, 128), (576, 128, 64), (576, 64, 64), (576, 32, 32), (96, 128, 32), (172, 128, 64), (172, 32, 32),
     (100, 128, 128), (8, 128, 32), (1, 64, 32), (97, 128, 128), (128, 32, 32)],
)  # fmt: skip
def test_block_for_when_a_width_is_given_then_pads_least_and_is_the_largest_of_those(width, largest, block):
    assert block_for(width, largest) == block
    assert padded(width, block) == min(padded(width, b) for b in (32, 64, 128) if b <= largest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "block"), [(128, 32), (128, 128), (172, 64), (8, 32)])
def test_quantize_when_values_are_rounded_then_each_is_the_nearest_level_of_its_block(kind, rows, block):
    weight = matrix(rows, 5)
    found = quantize(weight, kind, block)
    low, high = LEVELS[kind]
    assert found.values.dtype == torch.int8
    assert found.scales.dtype == torch.float32
    assert found.values.shape == (padded(rows, block), 5)
    assert found.scales.shape == (padded(rows, block) // block, 5)
    assert found.block == block
    assert low <= int(found.values.min()) <= int(found.values.max()) <= high
    assert (found.scales > 0).all()
    assert (found.values[rows:] == 0).all()
    levels = torch.arange(low, high + 1)
    for i in range(rows):
        steps = found.scales[i // block]
        nearest = (weight[i][:, None] - levels * steps[:, None]).abs().min(1).values
        error = (weight[i] - found.dequantized()[i]).abs()
        assert torch.allclose(error, nearest, atol=1e-7)


def test_quantize_when_the_scale_just_holds_the_largest_value_then_no_value_is_off_by_more_than_half_a_step():
    weight = matrix(256, 9)
    found = quantize(weight, "int4", 64, search=False)
    assert torch.equal(found.scales, weight.view(4, 64, 9).abs().amax(1) / 7)
    steps = found.scales.repeat_interleave(64, 0)
    assert ((weight - found.dequantized()).abs() <= steps / 2 * 1.0001).all()


def test_scales_when_searched_then_no_block_is_worse_and_most_are_better(monkeypatch):
    """Than under the bf16 number that just holds the largest value, the first one that is tried; the plainest way has all bits."""
    weight = matrix(256, 40)

    def errors(search: bool) -> torch.Tensor:
        found = quantize(weight, "int4", 128, search=search)
        return (weight - found.dequantized()).square().view(2, 128, 40).sum(1)

    searched, plain = errors(True), errors(False)
    monkeypatch.setitem(rounding._SHARES, "int4", (1.0,))
    holding = errors(True)
    assert (searched <= holding * 1.00001).all()
    assert float((searched < holding * 0.99).float().mean()) > 0.8
    assert float((searched < plain * 0.99).float().mean()) > 0.8


def test_scales_when_an_input_is_important_then_its_error_falls():
    weight = matrix(64, 200)
    importance = torch.ones(64)
    importance[7] = 1e4
    known, unknown = (quantize(weight, "int4", 64, i).dequantized() for i in (importance, None))
    assert (weight - known)[7].square().mean() < 0.5 * (weight - unknown)[7].square().mean()


def is_bf16(scales: torch.Tensor) -> bool:
    """Whether the lower half of every number is empty."""
    return not bool(scales.contiguous().view(torch.int32).bitwise_and(0xFFFF).any())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4, 1e-36, 1e36])
@pytest.mark.parametrize("important", [False, True])
def test_scales_when_found_then_are_bf16_numbers_within_a_256th_of_the_ones_that_hold(kind, size, important):
    weight = matrix(256, 50) * size
    scales = find_scales(weight, kind, 32, torch.arange(256.0) if important else None)
    assert is_bf16(scales)
    whole = weight.view(8, 32, 50).abs().amax(1).double() / LEVELS[kind][1]
    share = scales.double() / whole.clamp_min(2.0**-100)
    assert float(share.max()) <= 1 + 2.0**-8
    assert float(share.min()) >= (1 if kind == "int8" else 0.5) * (1 - 2.0**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_when_already_bf16_numbers_then_stay(kind):
    largest = torch.tensor([[1.0, 1.0078125, 1.9921875, 2.0**-90, 0.0]]) * LEVELS[kind][1]
    weight = torch.cat((largest, torch.zeros(31, 5)))
    found = quantize(weight, kind, 32)
    if kind == "int8":
        assert found.scales.tolist() == [[1.0, 1.0078125, 1.9921875, 2.0**-90, 1.0]]
    assert torch.equal(found.dequantized(), weight)


@pytest.mark.parametrize("block", [32, 128, 256])
def test_int8_when_rounded_then_the_largest_value_of_no_block_is_cut_off(block):
    """2,048 blocks whose largest values fill an octave: under the scale of each it is nearest to the last level."""
    weight = matrix(block, 2048)
    weight[5] = torch.linspace(1, 2, 2048) * torch.tensor([1.0, -1.0]).repeat(1024)
    found = quantize(weight, "int8", block)
    ratio = (weight.double() / found.scales.double().repeat_interleave(block, 0)).abs()
    assert float(ratio.max()) < 127.5
    assert float(ratio[5].min()) > 126.5
    assert int(found.values.abs().max()) == 127
    steps = found.scales.repeat_interleave(block, 0)
    assert ((weight - found.dequantized()).abs() <= steps / 2 * 1.00001).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1e-38, -1e-44, 3e38, -5.0])
def test_quantize_when_a_block_is_extreme_then_scales_are_positive_and_the_value_comes_back(kind, value):
    weight = matrix(64, 2)
    weight[:32, 0] = value
    found = quantize(weight, kind, 32)
    assert (found.scales > 0).all()
    assert found.scales.isfinite().all()
    assert is_bf16(found.scales)
    back = found.dequantized()[:32, 0]
    assert torch.allclose(back, weight[:32, 0], rtol=0.13, atol=1e-29)


def test_quantize_when_columns_go_in_other_steps_then_bits_are_the_same(monkeypatch):
    weight = matrix(160, 37)
    whole = quantize(weight, "int4", 32, torch.arange(160.0))
    monkeypatch.setattr(rounding, "_STEP", 160 * 5)
    parts = quantize(weight, "int4", 32, torch.arange(160.0))
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales.view(torch.int32), parts.scales.view(torch.int32))


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (1, 1), (32, 7)])
def test_int4_when_packed_then_is_what_onnx_and_the_bundle_read(shape):
    import onnx
    from onnx import numpy_helper

    values = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    packed = pack_int4(values).numpy().tobytes()
    assert len(packed) == -(-values.numel() // 2)
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.INT4, shape, packed, raw=True)
    assert np.array_equal(numpy_helper.to_array(tensor).astype(ml_dtypes.int4).astype(np.int8), values.numpy())
    assert np.array_equal(_unpacked(packed, values.numel()).reshape(shape), values.numpy())


def test_dequantized_when_compared_with_the_onnx_operator_then_has_the_same_bits():
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    found = quantize(matrix(96, 6), "int8", 32)
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["w", "s"], ["y"], axis=0, block_size=32)], "g", [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [96, 6])],
        [numpy_helper.from_array(found.values.numpy(), "w"), numpy_helper.from_array(found.scales.numpy(), "s")],
    )  # fmt: skip
    import onnxruntime

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {})[0].view(np.int32), found.dequantized().numpy().view(np.int32))


def correlated(count: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    mix = torch.randn((width, width), generator=generator) * (torch.rand(width, generator=generator) ** 3)
    return (torch.randn((count, width), generator=generator) @ mix).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "block"), [(128, 128), (172, 64), (300, 32)])
def test_gptq_when_inputs_are_correlated_then_outputs_are_closer_than_to_the_nearest(kind, rows, block):
    weight, x = matrix(rows, 24), correlated(2000, rows)
    moments = x.T @ x / len(x)

    def error(found: Quantized) -> float:
        return float((x @ (found.dequantized()[:rows] - weight).double()).square().mean())

    found = quantize_with(weight, kind, block, moments)
    assert found.values.shape == (padded(rows, block), 24)
    assert (found.values[rows:] == 0).all()
    assert is_bf16(found.scales)
    assert error(found) < 0.7 * error(quantize(weight, kind, block, moments.diagonal()))


def test_gptq_when_inputs_are_independent_and_alike_then_is_the_nearest():
    weight = matrix(64, 12)
    found, nearest = quantize_with(weight, "int4", 32, torch.eye(64, dtype=torch.float64)), quantize(weight, "int4", 32)
    assert torch.equal(found.values, nearest.values)
    assert torch.equal(found.scales, nearest.scales)


def test_gptq_when_an_input_never_comes_then_is_finite():
    x = correlated(500, 64)
    x[:, 10] = 0
    found = quantize_with(matrix(64, 8), "int4", 32, x.T @ x / len(x))
    assert found.dequantized().isfinite().all()
    silent = quantize_with(matrix(64, 8), "int4", 32, torch.zeros((64, 64), dtype=torch.float64))
    assert silent.dequantized().isfinite().all()


def test_gptq_when_outputs_go_in_other_parts_then_values_are_the_same(monkeypatch):
    from tformer_deploy.quantization import gptq

    x = correlated(500, 96)
    whole = quantize_with(matrix(96, 20), "int4", 32, x.T @ x)
    monkeypatch.setattr(gptq, "_OUTPUTS", 7)
    assert torch.equal(quantize_with(matrix(96, 20), "int4", 32, x.T @ x).values, whole.values)


def test_scales_when_found_for_a_padded_matrix_then_padding_counts_nothing():
    weight = matrix(40, 6)
    padded_weight = torch.nn.functional.pad(weight, (0, 0, 0, 24))
    assert torch.equal(find_scales(padded_weight, "int4", 64), quantize(weight, "int4", 64).scales)
