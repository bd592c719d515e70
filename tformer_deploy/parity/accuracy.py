"""What quantisation costs: deployed logits against the unquantised model, on a text or on what that model writes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tformer_deploy.bundle.quantization import block_for, is_matrix, untied
from tformer_deploy.parity.gates import ACCURACY, Check, judge
from tformer_deploy.parity.metrics import KL, SAME_BEST, measure, negative_log_likelihood, summarise
from tformer_deploy.parity.rounded_rows import rounded_rows
from tformer_deploy.parity.spool import Spool
from tformer_deploy.quantization.rounding import quantize
from tformer_deploy.quantization.tensors import read_matrix
from tformer_deploy.reference import Decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.checkpoints import Checkpoint
    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.plan import Suite

    Row = tuple[int, ...]

# The lines of int8, in blocks or dynamic. int4 has none of its own, for what it costs depends on the model: its KL may be no larger than that of
# the plainest way, rounding each value to nearest in blocks of 32, with rows rounded as in the runtime.
MEAN_KL, SAME_TOP1, PERPLEXITY = 1e-3, 0.99, 1.002
PLAIN_BLOCK = 32
# As for every dtype: below this margin either of two tokens is right.
MARGIN = 0.1
# Rows that the unquantised model writes itself where no text is given, and their length.
_ROWS: dict[Suite, int] = {"quick": 8, "full": 16}
_LENGTH = 96
# Tokens of each row that are decoded one at a time.
_STEPS = 24


@dataclass
class _Distance:
    """How far logits are from the unquantised model's: tables of :func:`metrics.measure`, and -log p of the ids that came."""

    tables: list[NDArray[np.float64]] = field(default_factory=list)
    wanted: list[NDArray[np.float64]] = field(default_factory=list)
    found: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, want: NDArray[np.float32], have: NDArray[np.float32], following: Sequence[int]) -> None:
        """Takes logits [N, V] and the ids that came after the first of their positions."""
        self.tables.append(measure(want, have))
        self.wanted.append(negative_log_likelihood(want[: len(following)], following))
        self.found.append(negative_log_likelihood(have[: len(following)], following))

    @property
    def mean_kl(self) -> float:
        """Over all positions, nats; NaN where there is none."""
        return float(np.concatenate(self.tables)[:, KL].mean()) if self.tables else float("nan")

    @property
    def perplexity_ratio(self) -> float:
        """Above 1: worse than the unquantised model; NaN where no id came."""
        wanted, found = np.concatenate(self.wanted), np.concatenate(self.found)
        return float(np.exp(found.mean() - wanted.mean())) if len(wanted) else float("nan")


def accuracy(candidate: Candidate, bundle: Bundle, checkpoint: Checkpoint, suite: Suite) -> list[Check]:
    """Prefill of whole rows and single decode steps against the unquantised model in fp32."""
    manifest, text = bundle.manifest, candidate.plan.text
    quantization = manifest.quantization
    assert quantization is not None
    reference = _untied_reference(checkpoint)
    if text is None:
        name, rows = "its own text", _written(reference, manifest.bos_token_id, manifest.max_length, suite)
    else:
        name, rows = text.name, list(text.windows)
    prefill, steps, plain = _Distance(), _Distance(), _Distance()
    wanted = Spool()
    for row in rows:
        wanted.append(_logits(reference, row))
    for row, want in zip(rows, wanted, strict=True):
        everywhere = np.arange(len(row), dtype=np.int64)[None]
        found = candidate.prefill([row], candidate.backend.allocate(1, len(row)), everywhere)[0]
        prefill.add(want, found, row[1:])
    _decode(candidate, rows, wanted, steps)
    if quantization.kind == "int4":
        _round_plainly(reference, checkpoint)
        with rounded_rows(reference, PLAIN_BLOCK):
            for row, want in zip(rows, wanted, strict=True):
                plain.add(want, _logits(reference, row), row[1:])
    group = f"{ACCURACY}, {name}"
    checks = [judge(group, "tokens compared", sum(map(len, rows)), 2, ">=", f"{len(rows)} rows")]
    if quantization.kind != "int4":
        for graph, distance in (("prefill", prefill), ("decode", steps)):
            checks += _int8_checks(group, graph, distance, text is not None)
        return checks
    detail = f"gate: plain rounding to nearest in blocks of {PLAIN_BLOCK}"
    checks.append(judge(group, "prefill: mean KL", prefill.mean_kl, plain.mean_kl, "<=", detail))
    halves = [_stepped(row) for row in rows]
    of_plain = np.concatenate([table[first:last, KL] for table, (first, last) in zip(plain.tables, halves, strict=True)])
    if steps.tables:
        checks.append(judge(group, "decode: mean KL", steps.mean_kl, float(of_plain.mean()), "<=", detail))
    for graph, distance in (("prefill", prefill), ("decode", steps), ("plain rounding", plain)):
        checks += _reported(group, graph, distance)
    return checks


def _int8_checks(group: str, graph: str, distance: _Distance, real_text: bool) -> list[Check]:
    """On text that the model wrote itself too few tokens are compared for a perplexity within two parts in a thousand."""
    if not distance.tables:
        return []
    top1 = summarise(distance.tables, MARGIN)
    checks = [judge(group, f"{graph}: mean KL", distance.mean_kl, MEAN_KL)]
    if top1.top1_positions:
        metric = f"{graph}: same top-1, margin ≥ {MARGIN:g}"
        checks.append(judge(group, metric, top1.top1_agreement, SAME_TOP1, ">=", f"{top1.top1_positions} positions"))
    reported = _reported(group, graph, distance)
    if real_text and graph == "prefill":
        reported = reported[:-1]
        checks.append(judge(group, f"{graph}: perplexity ratio", distance.perplexity_ratio, PERPLEXITY))
    return [*checks, *reported]


def _reported(group: str, graph: str, distance: _Distance) -> list[Check]:
    """Figures without a line; the perplexity is the last one."""
    if not distance.tables:
        return []
    table = np.concatenate(distance.tables)
    figures = [
        (f"{graph}: same top-1, all positions", float(table[:, SAME_BEST].mean()), f"{len(table)} positions"),
        (f"{graph}: perplexity ratio", distance.perplexity_ratio, ""),
    ]
    return [Check(group, metric, value, None, ">=", "reported", detail) for metric, value, detail in figures]


def _stepped(row: Row) -> tuple[int, int]:
    """First and last (excluded) position that is decoded by itself."""
    half = len(row) // 2
    return half, min(half + _STEPS, len(row)) if half else half


def _decode(candidate: Candidate, rows: Sequence[Row], wanted: Spool, distance: _Distance) -> None:
    """The first half of each row is prefilled, then all rows together take single steps; a short last row is left out."""
    count = max(last - first for first, last in map(_stepped, rows))
    if count < 1:
        return
    taken = [i for i, (first, last) in enumerate(map(_stepped, rows)) if last - first == count]
    starts = [_stepped(rows[i])[0] for i in taken]
    cache = candidate.backend.allocate(len(taken), max(len(rows[i]) for i in taken))
    candidate.prefill([rows[i][:start] for i, start in zip(taken, starts, strict=True)], cache)
    found: list[NDArray[np.float32]] = []
    for step in range(count):
        lengths = [start + step for start in starts]
        found.append(candidate.decode([rows[i][n : n + 1] for i, n in zip(taken, lengths, strict=True)], lengths, cache)[:, 0])
    for place, (i, start) in enumerate(zip(taken, starts, strict=True)):
        have = np.stack([logits[place] for logits in found])
        distance.add(wanted[i][start : start + count], have, rows[i][start + 1 : start + 1 + count])


def _untied_reference(checkpoint: Checkpoint) -> Decoder:
    """The unquantised model in fp32, its head apart from the embedding so that it can be rounded."""
    with torch.device("meta"):
        decoder = Decoder(untied(checkpoint.config))
    decoder = decoder.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(read_matrix(checkpoint, name) if is_matrix(name) else checkpoint.read(name, torch.float32))
    return decoder.eval()


def _round_plainly(decoder: Decoder, checkpoint: Checkpoint) -> None:
    """Every matrix to the nearest of 16 levels under the scale that just holds its block."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if is_matrix(name):
                block = block_for(len(parameter), PLAIN_BLOCK)
                rounded = quantize(read_matrix(checkpoint, name), "int4", block, search=False)
                parameter.copy_(rounded.dequantized()[: len(parameter)])


@torch.inference_mode()
def _logits(decoder: Decoder, row: Row) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = decoder(torch.tensor([row]))[0].numpy()
    return logits


@torch.inference_mode()
def _written(decoder: Decoder, bos: int | None, max_length: int, suite: Suite) -> list[Row]:
    """Rows that the model writes: each id drawn as it says, from numbers that are the same in every run."""
    config, count = decoder.config, _ROWS[suite]
    length = min(_LENGTH, max_length)
    random = np.random.Generator(np.random.Philox(key=29))
    first = random.integers(0, config.vocab_size, count) if bos is None else np.full(count, bos)
    past = [torch.zeros((count, config.n_kv_heads, length, config.head_dim)) for _ in range(2 * config.n_layers)]
    ids, last = torch.from_numpy(first)[:, None], torch.zeros((count, 1), dtype=torch.int64)
    logits, *past = decoder.prefill(ids, last, past)
    while ids.shape[1] < length:
        weights = logits[:, 0].double().softmax(-1).cumsum(-1).numpy()
        drawn = [
            min(int(np.searchsorted(w, u * w[-1], side="right")), len(w) - 1)
            for w, u in zip(weights, random.random(count), strict=True)
        ]
        lengths = torch.full((count,), ids.shape[1])
        ids = torch.cat((ids, torch.tensor(drawn)[:, None]), 1)
        logits, *past = decoder.decode(ids[:, -1:], lengths, last, past)
    return [tuple(row) for row in ids.tolist()]
