"""The PyTorch reference as a backend, so that the same session API runs it and anyone can compare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from tformer_deploy.backends.base import capacity_bucket
from tformer_deploy.backends.session import Session
from tformer_deploy.bundle.quantization import scale_name, untied
from tformer_deploy.quantization.rounding import Quantized
from tformer_deploy.reference.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import DType

_NAMES: dict[torch.dtype, DType] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class TorchCache:
    """Caches as tensors [B, K, C, D], key then value of each layer."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.batch, self.capacity = tensors[0].shape[0], tensors[0].shape[2]

    def read(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of one layer's key and value."""
        key, value = (t.float().numpy(force=True).copy() for t in self.tensors[2 * layer : 2 * layer + 2])
        return key, value

    def write(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Replaces one layer's key and value."""
        for tensor, array in zip(self.tensors[2 * layer : 2 * layer + 2], (key, value), strict=True):
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows."""
        return type(self)([t[start:stop] for t in self.tensors])

    def resize(self, rows: Sequence[int], capacity: int) -> Self:
        """Copies of rows, with another capacity."""
        kept, resized = min(capacity, self.capacity), []
        for tensor in self.tensors:
            new = tensor.new_zeros((len(rows), tensor.shape[1], capacity, tensor.shape[3]))
            new[:, :, :kept] = tensor[list(rows), :, :kept]
            resized.append(new)
        return type(self)(resized)


class TorchBackend:
    """Runs :meth:`Decoder.prefill` and :meth:`Decoder.decode`; the decoder is put into evaluation mode."""

    name = "torch"

    def __init__(self, decoder: Decoder, max_length: int | None = None, notes: tuple[str, ...] = ()) -> None:
        self.decoder = decoder.eval()
        self.config = decoder.config
        weight = decoder.embedding.weight
        self.device, self.torch_dtype = weight.device, weight.dtype
        self.dtype: DType = _NAMES[weight.dtype]
        self.max_length = min(max_length or self.config.max_length, self.config.max_length)
        self.max_batch: int | None = None
        self.notes = notes

    def capacity_for(self, length: int) -> int:
        """A bucket."""
        return capacity_bucket(length, self.max_length)

    def allocate(self, batch: int, capacity: int) -> TorchCache:
        """Zeroed tensors on the decoder's device."""
        shape = (batch, self.config.n_kv_heads, capacity, self.config.head_dim)
        n_tensors = 2 * self.config.n_layers
        return TorchCache([torch.zeros(shape, dtype=self.torch_dtype, device=self.device) for _ in range(n_tensors)])

    def prefill(self, input_ids: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        assert isinstance(cache, TorchCache)
        with torch.inference_mode():
            return self._store(self.decoder.prefill(self._tensor(input_ids), self._tensor(logit_positions), cache.tensors), cache)

    def decode(
        self, input_ids: NDArray[np.int64], past_lengths: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache
    ) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        assert isinstance(cache, TorchCache)
        with torch.inference_mode():
            ids, lengths, positions = (self._tensor(x) for x in (input_ids, past_lengths, logit_positions))
            return self._store(self.decoder.decode(ids, lengths, positions, cache.tensors), cache)

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _store(self, outputs: tuple[torch.Tensor, ...], cache: TorchCache) -> NDArray[np.float32]:
        # The reference returns new caches; copying them back keeps views of single rows valid.
        for tensor, present in zip(cache.tensors, outputs[1:], strict=True):
            tensor.copy_(present)
        logits: NDArray[np.float32] = outputs[0].numpy(force=True)
        return logits


def torch_session(model: Decoder | str | Path) -> Session:
    """A session over a Decoder, or over the checkpoint at a path, loaded in float32."""
    return Session(TorchBackend(model if isinstance(model, Decoder) else Decoder.from_pretrained(model)))


def bundle_backend(bundle: Bundle) -> TorchBackend:
    """The reference with the weights of a bundle, in the bundle's dtype; quantised ones are dequantised."""
    manifest = bundle.manifest
    config = manifest.config if manifest.quantization is None else untied(manifest.config)
    dtype = next(t for t, name in _NAMES.items() if name == manifest.dtype)
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype).to_empty(device="cpu")
    scaled = {name for name in manifest.tensors if scale_name(name) in manifest.tensors}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(_dequantized(bundle, name, parameter) if name in scaled else _from_numpy(bundle.tensor(name)))
    return TorchBackend(decoder, manifest.max_length)


def _dequantized(bundle: Bundle, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A quantised matrix without the padding of its inputs."""
    quantized = Quantized(_from_numpy(bundle.tensor(name)), _from_numpy(bundle.tensor(scale_name(name))))
    return quantized.dequantized()[: len(parameter)]


def _from_numpy(array: NDArray[np.generic]) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
