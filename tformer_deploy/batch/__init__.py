"""Length-bucketed batch inference: JSONL in, JSONL out."""
