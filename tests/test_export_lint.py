"""Every rule of the lint, made red by a graph that breaks it and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from conftest import LLAMA_LIKE

from tformer_deploy.bundle.signature import PHASES, Phase
from tformer_deploy.errors import InputError
from tformer_deploy.exporters.onnx.lint import bundle_faults, graph_faults, require_clean


def load(bundle: Path, phase: Phase = "decode") -> ir.Model:
    return ir.load(bundle / f"{phase}.onnx")


def node(model: ir.Model, kind: str) -> ir.Node:
    return next(n for n in model.graph if n.op_type == kind)


def value(model: ir.Model, name: str) -> ir.Value:
    return next(v for v in [*model.graph.inputs, *model.graph.outputs] if v.name == name)


def extend(n: ir.Node, position: int, added: ir.Value) -> None:
    n.resize_inputs(max(len(n.inputs), position + 1))
    n.replace_input_with(position, added)


def past_as_input(model):
    extend(node(model, "Attention"), 4, value(model, "past_key_values.0.key"))


def second_output(model):
    n = node(model, "Attention")
    n.resize_outputs(2)
    n.outputs[1].name = "present_key"


def wrap_present(model, kind="Identity"):
    output = model.graph.outputs[1]
    producer = output.producer()
    copy = ir.node(kind, [producer.outputs[0]], name="between")
    model.graph.append(copy)
    copy.outputs[0].name, output.name = output.name, "inner"
    copy.outputs[0].shape, copy.outputs[0].type = output.shape, output.type
    model.graph.outputs[1] = copy.outputs[0]


def wrap_past(model):
    past, scatter = value(model, "past_key_values.0.key"), node(model, "TensorScatter")
    copy = ir.node("Identity", [past], name="between")
    model.graph.insert_before(scatter, copy)
    scatter.replace_input_with(0, copy.outputs[0])


def read_past_elsewhere(model):
    model.graph.append(ir.node("Neg", [value(model, "past_key_values.0.key")], name="reader"))


def swap_caches(model):
    first, second = [n for n in model.graph if n.op_type == "TensorScatter"][:2]
    a, b = first.inputs[0], second.inputs[0]
    first.replace_input_with(0, b)
    second.replace_input_with(0, a)


def transpose_weight(model):
    n = node(model, "Transpose")
    n.replace_input_with(0, model.graph.initializers["norm.weight"])


def attribute(kind, name, made):
    def edit(model):
        node(model, kind).attributes[name] = made

    return edit


def inline_weight(model):
    weight = model.graph.initializers["embedding.weight"]
    weight.const_value = ir.tensor(np.zeros((131, 200), np.float32), name="embedding.weight")


def move_weight(model):
    weight = model.graph.initializers["norm.weight"]
    old = weight.const_value
    weight.const_value = ir.ExternalTensor(
        "other.bin", old.offset, old.length, old.dtype, shape=old.shape, name=old.name, base_dir=""
    )


def rename(name, new):
    def edit(model):
        value(model, name).name = new

    return edit


def set_type(name, dtype):
    def edit(model):
        value(model, name).dtype = dtype

    return edit


def set_shape(name, dims):
    def edit(model):
        value(model, name).shape = ir.Shape(dims)

    return edit


def drop_mask(model):
    node(model, "Attention").resize_inputs(3)


def foreign_domain(model):
    node(model, "MatMul").domain = "com.microsoft"


def lose_attention(model):
    n = node(model, "Attention")
    n.op_type = "Mul"
    n.resize_inputs(2)


def local_function(model):
    function = ir.Function("here", "f", graph=ir.Graph([], [], nodes=[]), attributes=[])
    model.functions[function.identifier()] = function


def nonpad(model):
    extend(node(model, "Attention"), 6, value(model, "past_lengths"))


def opset(number, domain=""):
    def edit(model):
        model.graph.opset_imports[domain] = number

    return edit


RULES = {
    "nonpad_kv_seqlen": (nonpad, "nonpad_kv_seqlen"),
    "past inside Attention": (past_as_input, "takes past keys"),
    "more than one output": (second_output, "2 outputs"),
    "mask and is_causal": (attribute("Attention", "is_causal", ir.AttrInt64("is_causal", 1)), "a mask and is_causal"),
    "no mask": (drop_mask, "must take the mask"),
    "softcap": (attribute("Attention", "softcap", ir.AttrFloat32("softcap", 30.0)), "softcap"),
    "softmax_precision": (attribute("Attention", "softmax_precision", ir.AttrInt64("softmax_precision", 1)), "softmax_precision"),
    "an attention less": (lose_attention, "there are 2 Attention nodes"),
    "another domain": (foreign_domain, "com.microsoft"),
    "another opset": (opset(23), "opsets are"),
    "an import of another domain": (opset(1, "com.microsoft"), "opsets are"),
    "a local function": (local_function, "local functions"),
    "Identity before present": (wrap_present, "present.0.key comes from Identity"),
    "Cast before present": (lambda m: wrap_present(m, "Cast"), "present.0.key comes from Cast"),
    "Identity after past": (wrap_past, "present.0.key is written over"),
    "past read elsewhere": (read_past_elsewhere, "read by Neg 'reader' too"),
    "caches changed places": (swap_caches, "present.0.value is written over past_key_values.0.key"),
    "circular cache": (attribute("TensorScatter", "mode", ir.AttrString("mode", "circular")), "circular"),
    "another axis": (attribute("TensorScatter", "axis", ir.AttrInt64("axis", 1)), "along axis 1"),
    "Transpose of a weight": (transpose_weight, "transposes the initializer norm.weight"),
    "a norm in half precision": (attribute("RMSNormalization", "stash_type", ir.AttrInt64("stash_type", 10)), "stash_type 1"),
    "a weight in the graph": (inline_weight, "embedding.weight lies in the graph itself"),
    "a weight in another file": (move_weight, "other.bin"),
    "an input's name": (rename("past_lengths", "lengths"), "inputs are input_ids, lengths"),
    "an output's name": (rename("logits", "scores"), "outputs are scores"),
    "an input's dtype": (set_type("past_lengths", ir.DataType.INT32), "input past_lengths is INT32"),
    "logits in half precision": (set_type("logits", ir.DataType.FLOAT16), "output logits is FLOAT16"),
    "a fixed capacity": (set_shape("past_key_values.0.key", ["batch", 2, 64, 16]), "input past_key_values.0.key is"),
    "a dim's name": (set_shape("logits", ["batch", "n", 131]), "output logits is"),
}


@pytest.mark.parametrize(("edit", "named"), RULES.values(), ids=RULES)
def test_lint_when_one_rule_is_broken_then_names_it(edit, named, llama_bundle):
    model = load(llama_bundle)
    assert list(graph_faults(model, LLAMA_LIKE, "fp32", "decode")) == []
    edit(model)
    with pytest.raises(InputError) as e:
        require_clean(model, LLAMA_LIKE, "fp32", "decode")
    assert named in e.value.message


def test_lint_when_prefill_is_not_causal_then_names_it(llama_bundle):
    model = load(llama_bundle, "prefill")
    del node(model, "Attention").attributes["is_causal"]
    assert "in prefill must be causal" in " ".join(graph_faults(model, LLAMA_LIKE, "fp32", "prefill"))


def test_lint_when_the_bundle_is_as_exported_then_is_silent(llama_bundle, gpt2_bundle):
    from tformer_deploy.bundle import open_bundle

    assert bundle_faults(open_bundle(llama_bundle)) == []
    assert bundle_faults(open_bundle(gpt2_bundle)) == []


@pytest.mark.parametrize("phase", PHASES)
def test_lint_when_the_config_is_another_then_is_red(llama_bundle, phase):
    assert list(graph_faults(load(llama_bundle, phase), LLAMA_LIKE, "fp16", phase))
