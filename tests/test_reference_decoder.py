"""Decoder: its three passes agree in every configuration, it learns, and it survives being saved."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.reference import Decoder, TransformerBlock, TransformerConfig, causal_mask
from tformer_deploy.reference.positions import rope_frequencies

BASE = ModelConfig(
    vocab_size=23, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=20, max_length=16, rope=RopeConfig()
)
FORMS = [
    dataclasses.replace(
        BASE, positions=positions, rope=RopeConfig() if positions == "rotary" else None, norm=norm, activation=activation,
        gated=activation == "silu", n_kv_heads=n_kv_heads, tied=tied, qkv_bias=bias, out_bias=bias, mlp_bias=bias,
    )
    for positions, norm, activation, n_kv_heads, tied, bias in itertools.product(
        ("learned", "rotary"), ("layernorm", "rmsnorm"), ("gelu", "gelu_tanh", "silu"), (4, 2, 1), (True, False), (True, False)
    )
]  # fmt: skip


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """Random values everywhere, biases and norms too, so that a term left out shows."""
    torch.manual_seed(seed)
    decoder = Decoder(config).double().eval()
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
    return decoder


def caches(config: ModelConfig, batch: int, capacity: int) -> list[Tensor]:
    """What an earlier sequence left: finite and wrong."""
    shape = (batch, config.n_kv_heads, capacity, config.head_dim)
    return [torch.full(shape, 3.0, dtype=torch.float64) for _ in range(2 * config.n_layers)]


def form_id(config: ModelConfig) -> str:
    return (
        f"{config.positions}-{config.norm}-{config.activation}-kv{config.n_kv_heads}"
        f"-{'tied' if config.tied else 'untied'}-{'bias' if config.qkv_bias else 'plain'}"
    )


@pytest.mark.parametrize("config", FORMS, ids=form_id)
@torch.no_grad()
def test_prefill_and_decode_when_compared_with_the_full_pass_then_agree(config):
    decoder = build(config)
    ids = torch.randint(config.vocab_size, (2, 9))
    want = decoder(ids)
    lengths = torch.tensor([5, 2])  # the shorter row is right-padded by tokens that must not matter
    logits, *cache = decoder.prefill(ids[:, :5], lengths[:, None] - 1, caches(config, 2, 12))
    torch.testing.assert_close(logits[:, 0], want[torch.arange(2), lengths - 1], rtol=0, atol=1e-5)
    for size in (1, 2, 1):  # token by token and a chunk of two
        new = torch.stack([ids[b, n : n + size] for b, n in enumerate(lengths.tolist())])
        positions = torch.arange(size).expand(2, size)
        logits, *cache = decoder.decode(new, lengths, positions, cache)
        seen = torch.stack([want[b, n : n + size] for b, n in enumerate(lengths.tolist())])
        torch.testing.assert_close(logits, seen, rtol=0, atol=1e-5)
        lengths = lengths + size


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=25)
@torch.no_grad()
def test_decode_when_rows_are_ragged_and_chunks_random_then_equals_each_row_alone(data):
    config = data.draw(st.sampled_from(FORMS), label="config")
    decoder = build(config, seed=data.draw(st.integers(0, 99), label="seed"))
    batch, total = data.draw(st.integers(1, 4), label="batch"), config.max_length
    ids = torch.randint(config.vocab_size, (batch, total))
    want = [decoder(row[None])[0] for row in ids]
    lengths = torch.tensor([data.draw(st.integers(1, 6), label="length") for _ in range(batch)])
    width = int(lengths.max())
    _, *cache = decoder.prefill(ids[:, :width], lengths[:, None] - 1, caches(config, batch, total + 1))
    while int(lengths.max()) < total:
        size = data.draw(st.integers(1, total - int(lengths.max())), label="size")
        new = torch.stack([ids[b, n : n + size] for b, n in enumerate(lengths.tolist())])
        logits, *cache = decoder.decode(new, lengths, torch.arange(size).expand(batch, size), cache)
        for b, n in enumerate(lengths.tolist()):
            torch.testing.assert_close(logits[b], want[b][n : n + size], rtol=0, atol=1e-5)
        lengths = lengths + size


@torch.no_grad()
def test_cache_when_decoded_then_earlier_slots_and_slots_beyond_are_untouched():
    decoder = build(BASE)
    before = caches(BASE, 2, 12)
    _, *written = decoder.prefill(torch.randint(23, (2, 4)), torch.tensor([[3], [3]]), before)
    lengths = torch.tensor([4, 2])
    _, *after = decoder.decode(torch.randint(23, (2, 1)), lengths, torch.zeros(2, 1, dtype=torch.int64), written)
    assert all((b == 3.0).all() for b in before)  # the caller's tensors are inputs, not outputs
    for old, new in zip(written, after, strict=True):
        for row, n in enumerate(lengths.tolist()):
            changed = (old[row] != new[row]).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
            assert changed == [n]


@pytest.mark.parametrize("config", [FORMS[0], FORMS[-1], BASE], ids=form_id)
def test_decoder_when_trained_a_few_steps_then_loss_goes_down_and_every_parameter_moves(config):
    torch.manual_seed(0)
    decoder = Decoder(dataclasses.replace(config, dropout=0.1)).train()
    start = {n: p.detach().clone() for n, p in decoder.named_parameters()}
    ids = torch.randint(config.vocab_size, (8, 9))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(decoder(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    # Without rotary positions a key bias adds the same to every score of a query, which softmax takes away again: no gradient.
    still = [n for n, p in decoder.named_parameters() if torch.equal(p, start[n]) and not n.endswith("key.bias")]
    assert still == []


def test_forward_when_text_is_longer_than_max_length_then_says_both_numbers():
    with pytest.raises(ValueError, match=r"holds 17 tokens a row; max_length is 16"):
        build(BASE)(torch.zeros(1, 17, dtype=torch.int64))


def test_rope_when_the_model_is_converted_then_frequencies_stay_exact_float32():
    want = rope_frequencies(BASE.rope, BASE.head_dim)
    for convert in (Decoder.half, Decoder.bfloat16, Decoder.double, lambda d: d.to("meta").to_empty(device="cpu")):
        decoder = convert(Decoder(BASE))
        assert decoder.rope is not None
        assert decoder.rope.frequencies.dtype == torch.float32
        assert torch.equal(decoder.rope.frequencies, want)


def test_rope_when_llama3_then_stretches_long_waves_keeps_short_ones_and_blends_between():
    rope = RopeConfig(500000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=8192)
    config = dataclasses.replace(BASE, head_dim=64, rope=rope)
    plain = rope_frequencies(RopeConfig(500000.0), config.head_dim)
    ratio = rope_frequencies(config.rope, config.head_dim) / plain
    waves = 2 * torch.pi / plain
    assert torch.equal(ratio[waves < 8192 / 4], torch.ones(int((waves < 8192 / 4).sum())))
    torch.testing.assert_close(ratio[waves > 8192], torch.full((int((waves > 8192).sum()),), 1 / 8))
    between = ratio[(waves > 8192 / 4) & (waves < 8192)]
    assert len(between) > 0
    assert ((between > 1 / 8) & (between < 1)).all()


@torch.no_grad()
def test_rope_when_compared_with_complex_rotation_then_agrees():
    decoder = build(BASE)
    assert decoder.rope is not None
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    positions = torch.arange(5)[None]
    cos, sin = decoder.rope(positions, torch.float64)
    turns = torch.polar(
        torch.ones(5, 4, dtype=torch.float64), positions[0, :, None] * rope_frequencies(BASE.rope, BASE.head_dim).double()
    )
    want = torch.complex(x[..., :4], x[..., 4:]) * turns
    got = torch.ops.tformer.rotary(x, cos, sin)
    torch.testing.assert_close(got, torch.cat((want.real, want.imag), dim=-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [FORMS[0], FORMS[-1], BASE], ids=form_id)
@torch.no_grad()
def test_decoder_when_saved_and_loaded_then_gives_the_same_logits(config, tmp_path):
    decoder = build(config).float()
    decoder.save_pretrained(tmp_path / "saved")
    loaded = Decoder.from_pretrained(tmp_path / "saved")
    assert loaded.config == config
    assert not loaded.training
    ids = torch.randint(config.vocab_size, (2, 7))
    assert torch.equal(loaded(ids), decoder(ids))
    assert torch.equal(Decoder.from_pretrained(tmp_path / "saved", torch.float64)(ids), decoder.double()(ids))
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float16, 2e-2), (torch.bfloat16, 2e-1)])
@torch.no_grad()
def test_decoder_when_in_half_precision_then_logits_are_float32_and_near(dtype, atol):
    decoder = build(BASE)
    ids = torch.randint(23, (2, 9))
    want = decoder(ids)
    got = decoder.to(dtype)(ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=atol * float(want.abs().max()))


@torch.no_grad()
def test_decoder_when_like_the_textbook_then_equals_the_textbook_blocks():
    """An absolute check: the passes of one Decoder could agree on something wrong, such as positions never added."""
    config = dataclasses.replace(FORMS[0], qkv_bias=False)  # learned positions, LayerNorm, GELU, MHA, tied, biases
    decoder = build(dataclasses.replace(config, head_dim=6))  # heads share the width, as the textbook has it
    parameters = dict(decoder.named_parameters())
    assert decoder.positions is not None
    ids = torch.randint(config.vocab_size, (2, 9))
    x = decoder.embedding.weight[ids] + decoder.positions.weight[:9]
    sizes = TransformerConfig(d_model=config.d_model, n_heads=config.n_heads, d_ff=config.d_ff)
    for i in range(config.n_layers):
        of = {n.removeprefix(f"blocks.{i}."): p for n, p in parameters.items() if n.startswith(f"blocks.{i}.")}
        block = TransformerBlock(sizes).double().eval()
        block.load_state_dict(
            {
                **{n: p for n, p in of.items() if n.startswith("norm")},
                "attention.qkv.weight": torch.cat([of[f"attention.{n}.weight"].T for n in ("query", "key", "value")]),
                "attention.out.weight": of["attention.out.weight"].T,
                "attention.out.bias": of["attention.out.bias"],
                "feed_forward.0.weight": of["feed_forward.up.weight"].T,
                "feed_forward.0.bias": of["feed_forward.up.bias"],
                "feed_forward.2.weight": of["feed_forward.down.weight"].T,
                "feed_forward.2.bias": of["feed_forward.down.bias"],
            }
        )
        x = block(x, causal_mask(9))
    x = torch.nn.functional.layer_norm(x, (config.d_model,), decoder.norm.weight, decoder.norm.bias, config.norm_eps)
    torch.testing.assert_close(decoder(ids), (x @ decoder.embedding.weight.T).float(), rtol=0, atol=1e-5)
