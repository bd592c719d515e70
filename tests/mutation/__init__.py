"""Faults put in on purpose, and whether what must see them does: ``python -m tests.mutation`` (docs/mutation.md)."""
