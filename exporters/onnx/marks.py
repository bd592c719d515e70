"""Names for what enters and leaves each block, so that ``check --bisect`` finds the values in a graph.

While a decoder is traced, hooks put a ``tformer::Mark`` node on those values; once the graph is optimised the nodes are taken
out again and only the names stay. No operator is added, and how a block is built inside does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
from torch import Tensor

from tformer_deploy.bundle.signature import ATTENTION_OUTPUT, BLOCK_OUTPUT, BLOCKS_INPUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.reference.decoder import Decoder

_DOMAIN = "tformer"


@torch.library.custom_op("tformer::mark", mutates_args=())
def mark(x: Tensor, name: str) -> Tensor:
    """``x`` itself, under a name."""
    return x.clone()


mark.register_fake(lambda x, name: torch.empty_like(x))

_SCHEMA = onnx.defs.OpSchema(
    "Mark",
    _DOMAIN,
    1,
    inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
    outputs=[onnx.defs.OpSchema.FormalParameter("y", "T")],
    type_constraints=[("T", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "")],
    attributes=[onnx.defs.OpSchema.Attribute("name", onnx.defs.OpSchema.AttrType.STRING)],
)
_MARK = onnxscript.values.Op(onnxscript.values.Opset(_DOMAIN, 1), "Mark", _SCHEMA)


def _translate(x: Any, name: str) -> Any:
    return _MARK(x, name=name)


MARKS: dict[Callable[..., Any], Callable[..., Any]] = {torch.ops.tformer.mark.default: _translate}


def mark_blocks(decoder: Decoder) -> None:
    """Hooks the marks onto a decoder that is about to be traced."""
    decoder.blocks[0].register_forward_pre_hook(lambda _, args: (mark(args[0], BLOCKS_INPUT), *args[1:]))
    for i, block in enumerate(decoder.blocks):
        block.get_submodule("attention").register_forward_hook(_hook(ATTENTION_OUTPUT.format(layer=i)))
        block.register_forward_hook(_hook(BLOCK_OUTPUT.format(layer=i)))


def name_marked_values(model: ir.Model) -> None:
    """Takes the marks out of a graph; the value that each stood on gets its name.

    An input, an output and a weight keep their own names; of two marks on one value the first counts.
    """
    named: set[ir.Value] = set()
    for node in [n for n in model.graph if n.domain == _DOMAIN]:
        value, output = node.inputs[0], node.outputs[0]
        assert value is not None
        output.replace_all_uses_with(value, replace_graph_outputs=True)
        if value.producer() is not None and not value.is_graph_output() and value not in named:
            value.name = node.attributes.get_string("name")
            named.add(value)
        model.graph.remove(node, safe=True)
    model.opset_imports.pop(_DOMAIN, None)


def _hook(name: str) -> Callable[..., Any]:
    """Marks what a module returns, or the first of what it returns."""

    def hook(_module: object, _args: object, output: Any) -> Any:
        return (mark(output[0], name), *output[1:]) if isinstance(output, tuple) else mark(output, name)

    return hook
