"""One profile with its context: shapes and addresses set when they change, the repeated step captured in a CUDA graph."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_deploy.backends.tensorrt.schedule import ProfileShape, StepPlan, layout
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, LOGITS, PAST_LENGTHS
from tformer_deploy.errors import TformerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.cuda import Device
    from tformer_deploy.backends.tensorrt.cache import CacheShape
    from tformer_deploy.backends.tensorrt.engine import LoadedPlan


@dataclass(frozen=True)
class Call:
    """What one execution computes.

    Attributes:
        input_ids: New tokens [B, S].
        past_lengths: Tokens that the rows hold [B].
        logit_positions: Positions within the new tokens [B, N].
    """

    input_ids: NDArray[np.int64]
    past_lengths: NDArray[np.int64]
    logit_positions: NDArray[np.int64]

    def inputs(self) -> dict[str, NDArray[np.int64]]:
        """By the graph's names."""
        return {INPUT_IDS: self.input_ids, PAST_LENGTHS: self.past_lengths, LOGIT_POSITIONS: self.logit_positions}


class Exchange:
    """The block of inputs and the logits, in device memory and in pinned host memory; shared by all profiles, never moved.

    Args:
        device: Where.
        profiles: What the largest call is taken from.
        vocab_size: Logits a position.
    """

    def __init__(self, device: Device, profiles: Sequence[ProfileShape], vocab_size: int) -> None:
        self._device, self._vocab = device, vocab_size
        rows = max(p.max_rows for p in profiles)
        positions = max(p.positions for p in profiles)
        sizes = {
            INPUT_IDS: 8 * max(p.max_rows * p.tokens[1] for p in profiles),
            PAST_LENGTHS: 8 * rows,
            LOGIT_POSITIONS: 8 * rows * positions,
        }
        self.offsets, inputs = layout(sizes)
        logits = 4 * rows * positions * vocab_size
        self._inputs, self.logits = device.allocate(inputs, "inputs"), device.allocate(logits, "logits")
        self._host_inputs, self._host_logits = device.allocate_pinned(inputs, "inputs"), device.allocate_pinned(logits, "logits")

    def address(self, name: str) -> int:
        """Where an input lies on the device."""
        return self._inputs + self.offsets[name]

    def send(self, call: Call) -> None:
        """Queues the copies of the inputs."""
        for name, values in call.inputs().items():
            host = self._host_inputs + self.offsets[name]
            _view(host, values.shape, np.int64)[...] = values
            self._device.copy_in(self.address(name), host, values.nbytes)

    def receive(self, rows: int, positions: int) -> NDArray[np.float32]:
        """Waits, and returns a copy of the logits [B, N, V]."""
        shape = (rows, positions, self._vocab)
        host = _view(self._host_logits, shape, np.float32)
        self._device.copy_out(self._host_logits, self.logits, host.nbytes)
        self._device.synchronize("running the engine")
        return np.array(host, dtype=np.float32)


class Runner:
    """Executes one profile.

    Args:
        plan: Whose profile.
        profile: Which.
        device: Where.
        exchange: Inputs and logits.
        shape: Of the caches.
        captures: Whether a repeated call is captured here; RTX captures by itself.
    """

    def __init__(
        self, plan: LoadedPlan, profile: ProfileShape, device: Device, exchange: Exchange, shape: CacheShape, captures: bool
    ) -> None:
        self._plan, self.profile, self._device, self._exchange, self._shape = plan, profile, device, exchange, shape
        self._steps, self._graph = StepPlan(captures), 0
        self._capture_failure: str | None = None
        self._context = plan.context(profile, device.stream)
        device.synchronize(f"choosing the profile {profile.name}")

    def run(self, call: Call, caches: tuple[int, ...]) -> NDArray[np.float32]:
        """Runs a call on the caches at these addresses, which it updates → logits [B, N, V].

        Raises:
            TformerError: CUDA or TensorRT failed.
        """
        rows, tokens = call.input_ids.shape
        positions = call.logit_positions.shape[1]
        try:
            self._exchange.send(call)
            action = self._steps.next((rows, tokens, positions, caches))
            if action == "bind":
                self._bind(call, caches)
            if action == "capture":
                self._capture()
            if self._graph:
                self._device.launch(self._graph)
            else:
                self._execute()
            return self._exchange.receive(rows, positions)
        except TformerError:
            self._drop_graph()
            self._steps.forget()
            raise

    def take_capture_failure(self) -> str | None:
        """Why the last step could not be captured, once; None where nothing failed."""
        failure, self._capture_failure = self._capture_failure, None
        return failure

    def _bind(self, call: Call, caches: tuple[int, ...]) -> None:
        self._drop_graph()
        rows = len(call.input_ids)
        cache_dims = (rows, self._shape.kv_heads, self._shape.capacity, self._shape.head_dim)
        for name, values in call.inputs().items():
            if name in self._plan.inputs:
                self._set(name, values.shape, self._exchange.address(name))
        for (past, present), address in zip(self._plan.aliases, caches, strict=True):
            self._set(past, cache_dims, address)
            self._set(present, None, address)
        self._set(LOGITS, None, self._exchange.logits)
        if unset := self._context.infer_shapes():
            self._plan.require(False, f"inferring shapes; {', '.join(unset)} lack one")

    def _set(self, name: str, shape: tuple[int, ...] | None, address: int) -> None:
        if shape is not None:
            self._plan.require(self._context.set_input_shape(name, shape), f"setting the shape {list(shape)} of {name}")
        self._plan.require(self._context.set_tensor_address(name, address), f"setting the address of {name}")

    def _execute(self) -> None:
        self._plan.require(self._context.execute_async_v3(self._device.stream), f"running the profile {self.profile.name}")

    def _capture(self) -> None:
        """Records the step; where that fails it runs plainly from now on, and :meth:`take_capture_failure` says why."""
        self._device.begin_capture()
        failure: TformerError | None = None
        try:
            self._execute()
        except TformerError as e:
            failure = e
        try:  # also after a failure: the stream must leave its capturing state
            self._graph = self._device.end_capture()
        except TformerError as e:
            failure = failure or e
        if failure is not None:
            self._drop_graph()
            self._steps.give_up()
            self._capture_failure = failure.message

    def _drop_graph(self) -> None:
        graph, self._graph = self._graph, 0
        if graph:
            self._device.forget(graph)


def _view(address: int, shape: tuple[int, ...], dtype: type[Any]) -> NDArray[Any]:
    """Memory at an address as an array."""
    block = (ctypes.c_ubyte * (math.prod(shape) * np.dtype(dtype).itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memoryview(block).cast("B"))
