"""Graphs derived for one CPU from a bundle's portable ones: rewritten, optimised, weights packed once and mapped by all."""

from tformer_deploy.backends.cpu.derived import Derived, derive, find_derived, remove_derived
from tformer_deploy.backends.cpu.plan import CpuPlan, Role, plan_for

__all__ = ["CpuPlan", "Derived", "Role", "derive", "find_derived", "plan_for", "remove_derived"]
