"""Unit and reference tests of changed architectures: exact where the method says so, loadable by transformers, the same in the engine."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.reshape import describe, kv_heads, latent, size_of, upcycle, window
from karui.inference.engine import Engine

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True}
IDS = torch.randint(0, 40, (1, 24), generator=torch.Generator().manual_seed(5))


def tiny(kind="llama", **options):
    """Weights large enough that attention is not uniform."""
    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
               "qwen3": (Qwen3Config, Qwen3ForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
               "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM)}
    torch.manual_seed(0)
    config, model = classes[kind]
    made = model(config(**{**SIZES, "head_dim": 8, **options})).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3)
    return made


def rows(n=6, length=30):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (length,), generator=g) for _ in range(n)]


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def check_everywhere(model, folder, atol=2e-4):
    """A folder that transformers reads back to the same logits, and the engine to the same log-probabilities."""
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(again), logits(model))
    wanted = torch.log_softmax(logits(model)[0, :-1], -1).gather(1, IDS[0, 1:, None])[:, 0]
    for runner in ("torch", "auto"):
        engine = Engine.load(folder, runner=runner, kv_dtype="float32", max_context=64, max_sequences=1)
        torch.testing.assert_close(torch.as_tensor(engine.score([IDS[0].tolist()])[0]).float(), wanted, atol=atol, rtol=0)
    return again


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_equal_heads_merge_into_what_they_are(kind, pooling, tmp_path):
    model = tiny(kind)
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                linear.weight[8:] = linear.weight[:8]
                if linear.bias is not None:
                    linear.bias[8:] = linear.bias[:8]
    merged = kv_heads.convert(model, 1, pooling)
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-4, rtol=1e-4)
    assert check_everywhere(merged, tmp_path).model.layers[0].self_attn.k_proj.weight.shape == (8, 32)


def test_heads_merge_by_their_mean_in_order():
    model = tiny(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    old = model.model.layers[2].self_attn
    new = kv_heads.convert(model, 2).model.layers[2].self_attn
    for projection in ("k_proj", "v_proj"):
        before, after = getattr(old, projection).weight.view(4, 8, 32), getattr(new, projection).weight.view(2, 8, 32)
        torch.testing.assert_close(after[0], (before[0] + before[1]) / 2)
        torch.testing.assert_close(after[1], (before[2] + before[3]) / 2)
    assert torch.equal(new.q_proj.weight, old.q_proj.weight) and new.num_key_value_groups == 4
    first = kv_heads.convert(model, 2, "first").model.layers[2].self_attn.k_proj.weight.view(2, 8, 32)
    assert torch.equal(first, old.k_proj.weight.view(4, 8, 32)[::2])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_local_layers_see_a_window_and_short_texts_nothing_of_it(kind, tmp_path):
    model = tiny(kind)
    local = window.convert(model, 6, 4)
    assert local.config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    torch.testing.assert_close(logits(local, IDS[:, :6]), logits(model, IDS[:, :6]))
    assert (logits(local) - logits(model)).abs().max() > 1e-2
    check_everywhere(local, tmp_path)


def test_a_token_is_reached_from_its_window_alone():
    """Without global layers, token 0 of L layers with a window w reaches token L (w - 1) and no further."""
    local = window.convert(tiny(), 3, None)
    changed = IDS.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 40
    moved = (logits(local, changed) - logits(local)).abs().amax(-1)[0]
    assert bool((moved[:9] > 1e-6).all()) and bool((moved[9:] == 0).all())


def windowed(kind):
    """A model with windows, converted or made with them."""
    if kind == "ministral":
        return window.convert(tiny(), 6, 4)
    if kind == "mistral":
        return tiny("mistral", sliding_window=6)
    return tiny("qwen2_moe", sliding_window=6, use_sliding_window=True, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
                shared_expert_intermediate_size=16, layer_types=["sliding_attention", "full_attention"] * 2)


@pytest.mark.parametrize("kind", ["ministral", "mistral", "qwen2_moe"])
def test_windows_in_training_are_those_of_transformers(kind):
    from karui.trainers.model import ATTENTION, LossSum, install_lean_ops, register_attention

    register_attention()
    local = windowed(kind)
    wanted = logits(local)[0]
    for lean in (False, True):
        local.set_attn_implementation(ATTENTION)
        if lean:
            assert install_lean_ops(local)["attention"] == 4
        ids = torch.cat([IDS[0], IDS[0, :9]])  # two documents
        positions, bounds = torch.cat([torch.arange(24), torch.arange(9)]), torch.tensor([0, 24, 33])
        hidden = LossSum(local, 8).hidden(ids, positions, bounds)
        torch.testing.assert_close(local.lm_head(hidden)[:24], wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(local.lm_head(hidden)[24:], wanted[:9], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("numbers", [(4, 2, 1), (3, 3, 1), (2, 1, 1), (6, 2, 2), (8, 4, 2), (4, 4, 4)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_mixture_of_whole_copies_starts_as_the_dense_model(kind, numbers, tmp_path):
    model = tiny(kind)
    mixture = upcycle.convert(model, *numbers)
    torch.testing.assert_close(logits(mixture), logits(model), atol=2e-4, rtol=2e-4)
    if numbers == (6, 2, 2):
        check_everywhere(mixture, tmp_path)


@pytest.mark.parametrize(("kind", "numbers"), [("llama", (6, 2, 2)), ("llama", (3, 1, 1)), ("qwen2", (4, 2, 1)), ("qwen3", (8, 4, 2))])
def test_a_mixture_with_a_correction_bias_starts_as_the_dense_model(kind, numbers, tmp_path):
    model = tiny(kind)
    mixture = upcycle.convert(model, *numbers, correction=True)
    assert mixture.config.model_type == "glm4_moe"
    torch.testing.assert_close(logits(mixture), logits(model), atol=2e-4, rtol=2e-4)
    bias = mixture.model.layers[0].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and bias.shape == numbers[:1] and not bias.any()
    bias += torch.linspace(-1, 1, numbers[0])  # other experts: copies as well
    torch.testing.assert_close(logits(mixture), logits(model), atol=2e-4, rtol=2e-4)
    check_everywhere(mixture, tmp_path)


def test_routers_differ_by_layer_and_seed_and_experts_are_copies():
    model = tiny()
    blocks = [layer.mlp for layer in upcycle.convert(model, 4, 2, router_std=0.02, seed=3).model.layers]
    other = upcycle.convert(model, 4, 2, router_std=0.02, seed=4).model.layers[0].mlp
    for another in (blocks[1], other):
        assert not torch.equal(blocks[0].gate.weight, another.gate.weight)
    assert float(blocks[0].gate.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    for e in range(4):
        assert torch.equal(blocks[1].experts.down_proj[e], model.model.layers[1].mlp.down_proj.weight)
    assert blocks[0].experts.down_proj.is_contiguous()


def test_shards_hold_each_neuron_once_and_a_part_of_them_is_scaled(tmp_path):
    model = tiny()
    mixture = upcycle.convert(model, 4, 1, 4)
    block, dense = mixture.model.layers[0].mlp, model.model.layers[0].mlp
    ups = block.experts.gate_up_proj[:, 12:].flatten(0, 1)
    matches = (ups[:, None] == dense.up_proj.weight[None]).all(-1)
    assert matches.shape == (48, 48) and bool((matches.sum(0) == 1).all()) and bool((matches.sum(1) == 1).all())
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        every = [block.experts(x, torch.full((7, 1), e), torch.ones(7, 1)) for e in range(4)]
        torch.testing.assert_close(torch.stack(every).mean(0), dense(x), atol=1e-4, rtol=1e-4)
    assert size_of(mixture.config).active < size_of(model.config).parameters
    check_everywhere(mixture, tmp_path)


def test_latent_attention_of_one_head_is_the_same_model(tmp_path):
    """All of the key rotated and all of the values kept: transformers' DeepseekV3ForCausalLM gives llama's logits."""
    model = tiny(num_key_value_heads=1)
    converted = latent.convert(model, latent.full_rank(model.config, 8), 8, rows())
    assert type(converted).__name__ == "DeepseekV3ForCausalLM" and latent.full_rank(model.config, 8) == 9
    torch.testing.assert_close(logits(converted), logits(model), atol=5e-4, rtol=5e-4)
    check_everywhere(converted, tmp_path)


def test_heads_that_turn_together_are_found():
    """Keys of two heads that are at each frequency multiples of one: their principal direction is all there is to rotate."""
    model = tiny()
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            k = layer.self_attn.k_proj.weight.view(2, 2, 4, 32)  # head, part of the pair, frequency
            factor = torch.linspace(-1.5, 2, 4) * (i + 1)
            k[1] = k[0] * factor[None, :, None]
    converted = latent.convert(model, latent.full_rank(model.config, 8), 8, rows())
    torch.testing.assert_close(logits(converted), logits(model), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rope_dims", [8, 4, 2])
def test_at_full_rank_only_the_rotation_of_the_rest_is_lost(rope_dims):
    """Against scores built here: the shared key rotated by the kept frequencies, the rest of each head's key not at all."""
    model = tiny()
    converted = latent.convert(model, latent.full_rank(model.config, rope_dims), rope_dims, rows())
    old, new = model.model.layers[0].self_attn, converted.model.layers[0].self_attn
    x = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        q, k, v = (p(x)[0].view(12, -1, 8) for p in (old.q_proj, old.k_proj, old.v_proj))
        c = new.kv_a_layernorm(new.kv_a_proj_with_mqa(x)[..., : new.kv_lora_rank])
        shared = new.kv_a_proj_with_mqa(x)[0, :, new.kv_lora_rank :]
        made = new.kv_b_proj(c)[0].view(12, 4, 16)
        queries = new.q_proj(x)[0].view(12, 4, 8 + rope_dims) * new.scaling
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    torch.testing.assert_close(made[..., 8:], v, atol=1e-3, rtol=1e-3)
    # unrotated, the two parts of a score add up to the old one
    parts = torch.einsum("qad,kad->aqk", queries[..., :8], made[..., :8]) + torch.einsum("qar,kr->aqk", queries[..., 8:], shared)
    torch.testing.assert_close(parts, torch.einsum("qad,kad->aqk", q, k) * 8**-0.5, atol=2e-3, rtol=2e-3)
    # and the rotated part turns by the frequencies that the old model has
    step = 8 // rope_dims
    frequencies = model.model.rotary_emb.inv_freq[::step]
    torch.testing.assert_close(converted.model.rotary_emb.inv_freq, frequencies)


def test_less_rank_is_less_cache_and_more_error():
    model = tiny(num_key_value_heads=1)  # here the rotation costs nothing
    errors = [float((logits(latent.convert(model, rank, 8, rows())) - logits(model)).square().mean()) for rank in (3, 5, 7, 9)]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1e3 * errors[-1]
    assert "KV cache 128 -> 88 bytes a token" in describe(model.config, latent.plan(model.config, 3, 8))


def test_the_compression_is_the_best_of_its_rank():
    """Against a singular value decomposition of the calibration text's own keys and values, mean taken out."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(500, 12, generator=g).double() @ torch.randn(12, 12, generator=g).double() + 1
    keys, values = torch.randn(6, 12, generator=g).double(), 3 * torch.randn(8, 12, generator=g).double()
    moment, mean = x.T @ x / len(x), x.mean(0)
    down, bias, up = latent._compress(keys, values, moment, mean, 5)
    c = x @ down.T + bias
    assert bool((c[:, -1] == latent.CONSTANT).all()) and float(c[:, :-1].square().mean()) == pytest.approx(1, rel=1e-6)
    c[:, -1] = 1
    both = torch.cat([x @ keys.T, x @ values.T], 1)
    centred = both - both.mean(0)
    weight = torch.ones(14).double()
    weight[:6] = centred[:, 6:].norm() / centred[:, :6].norm()
    error = ((c @ up.T - both) * weight).square().sum()
    lost = torch.linalg.svdvals(centred * weight)[4:].square().sum()
    assert float(error) == pytest.approx(float(lost), rel=1e-6)


def test_sizes_are_those_of_the_models():
    model = tiny()
    for made in (model, kv_heads.convert(model, 1), upcycle.convert(model, 4, 2), latent.convert(model, 9, 8, rows())):
        assert size_of(made.config).parameters == sum(p.numel() for p in made.parameters())
    local = size_of(window.plan(model.config, 16, 4))
    assert local.kv == 4 * 32 and local.local == 3 * 32 and local.kv_bytes(64) == 2 * 32 * (64 + 3 * 16)
    assert size_of(upcycle.plan(model.config, 4, 2)).active == size_of(model.config).parameters + 4 * (3 * 32 * 48 + 4 * 32)


def test_a_change_keeps_dtype_mode_and_gradients():
    model = tiny().to(torch.bfloat16).train()
    for made in (kv_heads.convert(model, 1), window.convert(model, 8), upcycle.convert(model, 2, 1),
                 latent.convert(model, 9, 8, rows())):
        assert made.training and {p.dtype for p in made.parameters()} == {torch.bfloat16}
        assert made.lm_head.weight is made.model.embed_tokens.weight
        made(IDS, labels=IDS).loss.backward()
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for n, p in made.named_parameters())


def test_bad_requests_are_named():
    model = tiny()
    config = model.config
    with pytest.raises(KaruiError, match="kv_heads is 3; the model has 4 key-value heads, which merge into 1, 2"):
        kv_heads.plan(tiny(num_key_value_heads=4).config, 3)
    with pytest.raises(KaruiError, match="nothing to merge"):
        kv_heads.plan(tiny(num_key_value_heads=1).config, 1)
    with pytest.raises(KaruiError, match="expected 1 to 63"):
        window.plan(config, 64)
    with pytest.raises(KaruiError, match="every is 5; expected 2 to 4"):
        window.plan(config, 8, 5)
    with pytest.raises(UnsupportedError, match="has a window of 8 tokens already"):
        window.plan(window.plan(config, 8), 4)
    with pytest.raises(KaruiError, match="do not fit together"):
        upcycle.plan(config, 4, 5)
    with pytest.raises(KaruiError, match="does not divide the 48 neurons"):
        upcycle.plan(config, 5, 5, 5)
    with pytest.raises(UnsupportedError, match="a mixture of experts already"):
        upcycle.plan(upcycle.plan(config, 4), 4)
    with pytest.raises(UnsupportedError, match="take one without"):
        upcycle.plan(window.plan(tiny("qwen2").config, 8), 4)
    with pytest.raises(KaruiError, match="rank is 26; expected 2 to 25"):
        latent.plan(config, 26)
    with pytest.raises(KaruiError, match="rope_dims is 6; expected an even divisor of a head's size, 8"):
        latent.plan(config, 8, 6)
    with pytest.raises(UnsupportedError, match="mla knows models of type llama"):
        latent.plan(tiny("qwen2").config, 8)
    with pytest.raises(UnsupportedError, match="no windows"):
        latent.plan(window.plan(config, 8), 8)
    with pytest.raises(UnsupportedError, match="rope_type 'yarn'"):
        latent.plan(tiny(rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}).config, 8)
    with pytest.raises(UnsupportedError, match="biases in a model of type 'llama'"):
        kv_heads.plan(tiny(attention_bias=True).config, 1)
    with pytest.raises(KaruiError, match="needs calibration text"):
        latent.convert(model, 9, 8)
