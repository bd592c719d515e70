"""Which rewritten graph serves what on a CPU, and why: decided from the model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tformer_deploy.config import DType, ModelConfig

# What a graph is asked for: prompts from position 0 (any batch), one new token a row, several of one row, a few of several rows.
Role = Literal["prefill", "decode", "chunk", "several"]
Graph = Literal["step", "decode", "several"]


# Query heads of a group: GroupQueryAttention reads keys once a head and up to a row's length, a folded product once a group and up
# to the capacity. Measured from 2 to 8 heads (docs/log.md).
FOLDED_FROM = 4


@dataclass(frozen=True)
class CpuPlan:
    """The derived graphs of a model.

    Attributes:
        graphs: Those to derive, none where nothing applies. ``step``: rewritten to GroupQueryAttention, for prompts, one new token a
            row, or several new tokens of one row. ``decode``: grouped heads folded into one, for one new token a row. ``several``:
            the same for a few new tokens of several rows.
        reasons: A sentence for each rewrite: why it does or does not apply.
    """

    graphs: tuple[Graph, ...]
    reasons: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether anything is derived at all."""
        return bool(self.graphs)

    def graph_for(self, role: Role) -> Graph:
        """Which of them serves a role."""
        return role if role in ("decode", "several") and role in self.graphs else "step"


def plan_for(config: ModelConfig, dtype: DType) -> CpuPlan:
    """The plan for a model in a dtype."""
    if dtype != "fp32":
        return CpuPlan((), (f"Nothing is derived for {dtype}: a CPU has no faster kernels for it.",))
    if config.positions == "alibi":
        return CpuPlan((), ("GroupQueryAttention is not used: ALiBi adds a bias for every head and slot.",))
    if config.head_dim % 8:
        return CpuPlan((), (f"GroupQueryAttention is not used: head_dim {config.head_dim} is no multiple of 8.",))
    step = "GroupQueryAttention serves prompts: its memory grows with the length, not with its square; cost follows length, not capacity."
    groups = config.n_heads // config.n_kv_heads
    if groups == 1:
        return CpuPlan(("step",), (step, "It serves decoding too: each head has its own keys."))
    if config.attention_softcap is not None:
        return CpuPlan(("step",), (step, "It serves decoding too: soft caps are computed there as well."))
    several = f"A few new tokens of several rows fold {groups} query heads of a group into one product over their keys."
    if groups < FOLDED_FROM:
        few = f"It serves decoding too: groups of {groups} heads are fewer than {FOLDED_FROM}, from where folding them is faster."
        return CpuPlan(("step", "several"), (step, few, several))
    folded = f"Decoding folds {groups} query heads of a group into one product over their keys, which are then read once."
    return CpuPlan(("step", "decode", "several"), (step, folded, several))
