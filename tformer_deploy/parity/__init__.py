"""Parity with PyTorch: red means red. Needs torch."""

from tformer_deploy.parity.check import check_bundle, judge_again, own_lines
from tformer_deploy.parity.report import Report

__all__ = ["Report", "check_bundle", "judge_again", "own_lines"]
