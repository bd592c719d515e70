"""Writes sampling.json: inputs by rule, ids by ``generation/sampling.py``. Other implementations must give the same ids.

Logits are 3 × numpy's standard normal from ``Philox(key=logits_key)``, as float32; position p goes from 0 to 7.
"""

import json
from pathlib import Path

import numpy as np

from tformer_deploy.generation.sampling import SamplingOptions, sample

OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.5},
]

cases = []
for number, options in enumerate(OPTIONS):
    for vocab, seed in ((17, 0), (1000, 2**64 - 1)):
        logits = np.random.Generator(np.random.Philox(key=number)).standard_normal(vocab).astype(np.float32) * 3
        history = [1, 2, 3, 5, 8, 13]
        ids = [sample(logits, SamplingOptions(**options), seed, p, history) for p in range(8)]
        cases.append({"logits_key": number, "vocab": vocab, "options": options, "seed": seed, "history": history, "ids": ids})
(Path(__file__).parent / "sampling.json").write_text(json.dumps(cases, indent=1) + "\n")
