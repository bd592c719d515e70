"""The reference with what reaches each quantised matrix rounded to int8, as runtimes round it that multiply whole numbers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tformer_deploy.bundle.quantization import HEAD, block_for, is_matrix
from tformer_deploy.quantization.rows import round_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from tformer_deploy.reference import Decoder


@contextlib.contextmanager
def rounded_rows(decoder: Decoder, block: int | None) -> Iterator[None]:
    """Within it, every row that a matrix of the untied ``decoder`` reads is rounded, one scale for each block of inputs.

    Args:
        decoder: The reference.
        block: Inputs that share a scale, at most; None: all of them.
    """
    modules = [name.removesuffix(".weight") for name, _ in decoder.named_parameters() if is_matrix(name)]
    assert HEAD.removesuffix(".weight") in modules, "a tied head reads the embedding"
    handles = [decoder.get_submodule(name).register_forward_pre_hook(_hook(block)) for name in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(block: int | None) -> Callable[[object, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _module, arguments: (_rounded(arguments[0], block_for(arguments[0].shape[-1], block)), *arguments[1:])


def _rounded(x: Tensor, block: int) -> Tensor:
    values, scales = round_rows(x, block)
    return (values * scales).flatten(-2)[..., : x.shape[-1]]
