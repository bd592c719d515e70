"""The Python API in one page: open a bundle, prefill ragged rows of ids, decode greedily, read a row's cache.

python samples/python_session.py demo/shakespeare.bundle "ROMEO:" "First Citizen: We are" --tokens 40
"""

import argparse

from tokenizers import Tokenizer

import tformer_deploy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens a row at most")
    parser.add_argument("--backend", default="onnxruntime", help="onnxruntime, torch or tensorrt")
    arguments = parser.parse_args()
    bundle = tformer_deploy.open_bundle(arguments.bundle)
    tokenizer = Tokenizer.from_str((bundle.asset("tokenizer.json") or b"").decode())
    session = bundle.session(arguments.backend)
    rows = [tokenizer.encode(prompt).ids for prompt in arguments.prompts]
    ends, live = set(bundle.manifest.eos_token_ids), set(range(len(rows)))
    logits = session.prefill(rows)  # [B, V] after each row's last token; rows may differ in length
    for _ in range(arguments.tokens):
        chosen = logits.argmax(-1).tolist()
        live -= {i for i in live if chosen[i] in ends}
        for i in live:
            rows[i].append(chosen[i])
        if not live:
            break
        logits = session.decode(chosen)  # one token a row; what follows a row's end goes unread
    print(*(repr(tokenizer.decode(row)) for row in rows), sep="\n")
    key, value = session.read_cache(0)[0]  # layer 0 of row 0: [kv_heads, length, head_dim] each
    print(f"lengths {list(session.lengths)}, key {key.shape}, value {value.shape}")


if __name__ == "__main__":
    main()
