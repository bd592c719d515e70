"""llama.cpp through llama-cpp-python's C interface, built here for this processor; quantised by its own quantiser."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protocol
from gguf_writer import write_gguf

if TYPE_CHECKING:
    from protocol import Model, OnStep

# Without a wheel pip builds it, which needs a compiler and cmake.
REQUIREMENTS = ("llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors", "numpy")
BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
PRECISIONS = ("fp32", "int8", "int4")
PACKAGES = ("llama-cpp-python",)
_FILE = "model.gguf"
_TYPES = {"int8": "LLAMA_FTYPE_MOSTLY_Q8_0", "int4": "LLAMA_FTYPE_MOSTLY_Q4_0"}
_PIECE = 1024  # contexts are made for whole pieces
_BATCH = 2048


def convert(checkpoint: Path, precision: str, folder: Path) -> None:
    import llama_cpp

    folder.mkdir(parents=True)
    if precision == "fp32":
        write_gguf(checkpoint, folder / _FILE)
        return
    whole = folder / "fp32.gguf"
    write_gguf(checkpoint, whole)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, _TYPES[precision])
    failed = llama_cpp.llama_model_quantize(str(whole).encode(), str(folder / _FILE).encode(), ctypes.byref(settings))
    whole.unlink()
    if failed:
        raise RuntimeError(f"llama_model_quantize returned {failed}")


def load(folder: Path, precision: str, threads: int) -> Model:
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(folder / _FILE).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError("llama_model_load_from_file failed")
    return _Model(model, threads)


class _Model:
    def __init__(self, model: Any, threads: int) -> None:
        import llama_cpp

        self._model, self._threads = model, threads
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._contexts: dict[tuple[int, int], Any] = {}

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        import llama_cpp

        context = self._context(len(rows), len(rows[0]) + new_tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        past, width = 0, len(rows[0])
        batch = llama_cpp.llama_batch_init(len(rows) * width, 0, 1)
        try:
            for _ in range(new_tokens):
                tokens = self._decode(context, batch, rows, past)
                past, rows = past + len(rows[0]), [[token] for token in tokens]
                on_step(tokens)
        finally:
            llama_cpp.llama_batch_free(batch)

    def _decode(self, context: Any, batch: Any, rows: list[list[int]], past: int) -> list[int]:
        import llama_cpp
        import numpy as np

        at, last = 0, []
        for sequence, row in enumerate(rows):
            for i, token in enumerate(row):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, past + i, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, i == len(row) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        failed = llama_cpp.llama_decode(context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        logits = (np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (self._vocab_size,)) for i in last)
        return [int(row.argmax()) for row in logits]

    def _context(self, rows: int, length: int) -> Any:
        import llama_cpp

        room = -(-length // _PIECE) * _PIECE
        if (rows, room) not in self._contexts:
            settings = llama_cpp.llama_context_default_params()
            settings.n_ctx, settings.n_seq_max, settings.n_batch = rows * room, rows, max(_BATCH, rows * room)
            settings.n_threads = settings.n_threads_batch = self._threads
            context = llama_cpp.llama_init_from_model(self._model, settings)
            if not context:
                raise RuntimeError(f"no context for {rows} rows of {room} tokens")
            self._contexts[rows, room] = context
        return self._contexts[rows, room]


if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
