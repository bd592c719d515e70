"""Which rewritten graph serves what on a CPU, and why: decided from the model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tformer_deploy.config import DType, ModelConfig

# What a graph is asked for: prompts from position 0 (any batch), one new token a row, several of one row, a few of several rows.
Role = Literal["prefill", "decode", "chunk", "several"]
Graph = Literal["step", "decode", "several"]


@dataclass(frozen=True)
class CpuPlan:
    """The derived graphs of a model.

    Attributes:
        step: Rewritten to GroupQueryAttention: prompts, one new token a row, or several new tokens of one row.
        folded: Grouped heads are folded into one, in a graph for one new token a row and another for several.
        reasons: A sentence for each rewrite: why it does or does not apply.
    """

    step: bool
    folded: bool
    reasons: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether anything is derived at all."""
        return self.step

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The files to derive."""
        return ("step", "decode", "several") if self.folded else ("step",)

    def graph_for(self, role: Role) -> Graph:
        """Which of them serves a role."""
        if self.folded and (role == "decode" or role == "several"):
            return role
        return "step"


def plan_for(config: ModelConfig, dtype: DType) -> CpuPlan:
    """The plan for a model in a dtype."""
    if dtype != "fp32":
        return CpuPlan(False, False, (f"Nothing is derived for {dtype}: a CPU has no faster kernels for it.",))
    if config.positions == "alibi":
        return CpuPlan(False, False, ("GroupQueryAttention is not used: ALiBi adds a bias for every head and slot.",))
    if config.head_dim % 8:
        return CpuPlan(False, False, (f"GroupQueryAttention is not used: head_dim {config.head_dim} is no multiple of 8.",))
    step = "GroupQueryAttention serves prompts: its memory grows with the length, not with its square; cost follows length, not capacity."
    groups = config.n_heads // config.n_kv_heads
    if groups == 1:
        return CpuPlan(True, False, (step, "It serves decoding too: each head has its own keys."))
    if config.attention_softcap is not None:
        return CpuPlan(True, False, (step, "It serves decoding too: soft caps are computed there as well."))
    folded = f"Decoding folds {groups} query heads of a group into one product over their keys, which are then read once."
    return CpuPlan(True, True, (step, folded))
