"""Trains the sample checkpoint ``samples/shakespeare``: a byte-level BPE tokenizer and a small Decoder on ``samples/text``.

    python samples/train_sample.py --output samples/shakespeare

One thread and fixed seeds: the same machine and the same torch give the same checkpoint. About ten minutes on one CPU core.
The last tenth of the text is held out; the loss and the perplexity on it are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # before tokenizers: its merges must not depend on threads

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.reference.decoder import Decoder

SAMPLES = Path(__file__).resolve().parent
END = "<|endoftext|>"
CONFIG = ModelConfig(
    vocab_size=1024, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=384, max_length=512,
    norm="rmsnorm", activation="silu", gated=True, positions="rotary", rope=RopeConfig(theta=10000.0), tied=True,
)  # fmt: skip


def read_documents(folder: Path, seed: int) -> list[str]:
    """The speeches of every text in ``folder``, joined into documents of one to eight, each to end in the END token.

    A model that has seen texts end can end its own: about one speech in four or five is the last of its document.
    """
    draw = random.Random(seed)
    documents = []
    for path in sorted(folder.glob("*.txt")):
        speeches = path.read_text("utf-8").strip().split("\n\n")
        while speeches:
            count = draw.randint(1, 8)
            documents.append("\n\n".join(speeches[:count]))
            speeches = speeches[count:]
    return documents


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and ids decode to the same bytes. END has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """One stream of ids [n] int64, END after each document."""
    end = tokenizer.token_to_id(END)
    return torch.tensor([i for d in documents for i in [*tokenizer.encode(d).ids, end]])


def train(stream: Tensor, steps: int, seed: int, rows: int = 8, learning_rate: float = 3e-3) -> Decoder:
    """AdamW on random windows of ``stream``; a short warm-up, then a cosine to a tenth of the rate.

    Windows have 128 tokens at first (more updates for the time) and the model's full length in the last fifth of the steps.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(CONFIG).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    started, warm_up = time.perf_counter(), max(1, steps // 20)
    for step in range(steps):
        rate = min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        length, count = (128, rows) if step < steps * 4 // 5 else (CONFIG.max_length, max(1, rows // 4))
        loss = _loss(model, _windows(stream, length, count, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {time.perf_counter() - started:.0f} s", flush=True)
    return model.eval()


def _windows(stream: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """[count, length + 1] ids: inputs and, one further, targets."""
    starts = torch.randint(len(stream) - length - 1, (count,), generator=generator)
    return torch.stack([stream[s : s + length + 1] for s in starts.tolist()])


def _loss(model: Decoder, window: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Decoder, stream: Tensor) -> float:
    """Mean cross-entropy (nats a token) over ``stream`` in windows of the model's length, one after the other."""
    windows = stream.split(CONFIG.max_length + 1)[:-1]
    return float(torch.stack([_loss(model, w[None]) for w in windows]).mean())


def write_assets(folder: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer and the generation settings beside the weights, in Hugging Face's names."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "model_max_length": CONFIG.max_length,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"eos_token_id": tokenizer.token_to_id(END)},
    }
    for name, values in settings.items():
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=SAMPLES / "shakespeare", help="the checkpoint's folder")
    parser.add_argument("--text", type=Path, default=SAMPLES / "text", help="folder of .txt files")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    documents = read_documents(arguments.text, arguments.seed)
    held_out = documents[len(documents) * 9 // 10 :]
    documents = documents[: len(documents) * 9 // 10]
    tokenizer = train_tokenizer(documents, CONFIG.vocab_size)
    stream, held_out_stream = encode(tokenizer, documents), encode(tokenizer, held_out)
    print(f"{len(stream)} tokens to train on, {len(held_out_stream)} held out")
    model = train(stream, arguments.steps, arguments.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.output)
    write_assets(arguments.output, tokenizer)
    held_out_bytes = sum(len(d.encode()) for d in held_out)
    loss = evaluate(model, held_out_stream)
    bits = loss * len(held_out_stream) / held_out_bytes / math.log(2)
    print(f"held out: loss {loss:.3f} nats a token, perplexity {math.exp(loss):.2f}, {bits:.3f} bits a byte")


if __name__ == "__main__":
    main()
