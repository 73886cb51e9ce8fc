"""Unit and reference tests of sparse attention given to a model: the same as before up to top_k tokens, loadable by transformers, the
same in the engine; an indexer that starts as the attention finds what attention looks at."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.reshape import describe, latent, size_of, sparse
from karui.inference.engine import Engine
from tests.distill.test_reshape import IDS, logits, rows, tiny

pytestmark = pytest.mark.usefixtures("first_of_equals")

LONG = torch.randint(0, 40, (1, 48), generator=torch.Generator().manual_seed(6))
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, n_group=2,
               topk_group=1)


def dense(**options):
    """A tiny llama with latent attention."""
    model = tiny(**options)
    return latent.convert(model, 20, 8, rows(12, 48))


def released(**options):
    """A deepseek_v3 as released ones are: a norm that matters, a latent of queries, experts."""
    torch.manual_seed(3)
    config = AutoConfig.for_model("deepseek_v3", **{**dict(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24,
        kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=64), **EXPERTS, **options})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim >= 2 or "correction" in name:
                tensor.normal_(std=0.3)
            elif "kv_a_layernorm" in name:
                tensor.uniform_(-2, 2)
    return model


def check_everywhere(model, folder):
    """A folder that transformers reads back to the same logits; the engine's log-probabilities, also of texts beyond top_k."""
    model.save_pretrained(folder, save_original_format=False)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(again, LONG), logits(model, LONG))
    wanted = torch.log_softmax(logits(model, LONG)[0, :-1], -1).gather(1, LONG[0, 1:, None])[:, 0]
    for runner in ("torch", "auto"):
        engine = Engine.load(folder, runner=runner, kv_dtype="float32", max_context=64, max_sequences=1)
        torch.testing.assert_close(torch.as_tensor(engine.score([LONG[0].tolist()])[0]).float(), wanted, atol=3e-4, rtol=0)
    return again


@pytest.mark.parametrize("start", ["attention", "random"])
@pytest.mark.parametrize("make", [dense, released])
def test_up_to_top_k_tokens_nothing_changes_and_everyone_agrees_beyond(make, start, tmp_path):
    model = make()
    rank = 33 if model.config.q_lora_rank is None else None
    made = sparse.convert(model, 16, 12, 16, rank, start=start, rows=rows(12, 48))
    assert type(made).__name__ == "DeepseekV32ForCausalLM"
    torch.testing.assert_close(logits(made, IDS[:, :16]), logits(model, IDS[:, :16]), atol=2e-3, rtol=2e-3)
    assert (logits(made, LONG) - logits(model, LONG))[:, 16:].abs().max() > 1e-2
    check_everywhere(made, tmp_path)


def test_a_latent_of_queries_loses_the_least():
    """Of the queries that calibration text makes, by their own principal directions."""
    model = dense()
    text, wanted = rows(12, 48), None
    errors = []
    for rank in (33, 32, 24, 12):
        made = sparse.convert(model, 40, 4, 16, rank, rows=text)
        ids = text[0][None, :40]
        wanted = logits(model, ids) if wanted is None else wanted
        errors.append(float((logits(made, ids) - wanted).square().mean()))
    assert errors == sorted(errors) and errors[-1] > 100 * errors[0]


def test_what_calibration_text_does_not_have_is_read_as_well():
    """Six tokens span six directions of the first layer's input; the others count little, and are there."""
    model = dense()
    made = sparse.convert(model, 40, 4, 16, 32, rows=[row % 6 for row in rows(12, 48)])
    assert (logits(made) - logits(model)).square().mean() < 0.01 * logits(model).var()
    made.train()(IDS, labels=IDS).loss.backward()
    model.train()(IDS, labels=IDS).loss.backward()
    assert made.model.embed_tokens.weight.grad.norm() < 1.5 * model.model.embed_tokens.weight.grad.norm()


def test_the_compression_of_queries_is_the_best_of_its_rank():
    """Against a singular value decomposition of the calibration text's own queries."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(500, 12, generator=g).double() @ torch.randn(12, 12, generator=g).double() + 1
    q = torch.randn(20, 12, generator=g).double()
    made = sparse._queries(q, x.T @ x / len(x), 6)
    c = x @ made["q_a_proj.weight"].T + made["q_a_proj.bias"]
    assert bool((c[:, -1] == latent.CONSTANT).all())
    error = (c @ made["q_b_proj.weight"].T - x @ q.T).square().sum()
    lost = torch.linalg.svdvals(x @ q.T)[5:].square().sum()
    assert float(error) == pytest.approx(float(lost), rel=1e-6)


def mass(model, ids, top):
    """Mean over rows beyond `top` and layers of the dense attention's mass on the keys that the indexer picks, and the most there is."""
    from karui.kernels.sparse_attention import choose
    from karui.trainers.model import ATTENTION, register_attention
    from karui.trainers.sparse import install_sparse_attention

    register_attention()
    model.set_attn_implementation(ATTENTION)
    install_sparse_attention(model)
    found = []

    def look(module, args, kwargs):
        lean, x = module.forward, kwargs["hidden_states"]
        turn = tuple(t[0] for t in kwargs["position_embeddings"])
        residual = module.q_a_layernorm(module.q_a_proj(x))
        q, k, _ = lean._projected(x, residual, turn)
        cu = torch.tensor([0, x.shape[1]])
        shares = (q @ k.mT * module.scaling).masked_fill(~torch.ones(x.shape[1], x.shape[1]).tril().bool(), float("-inf")).softmax(-1)[0].mean(0)
        chosen = choose(*lean._index(x[0], residual[0], turn), cu, top)[0].long()
        found.append((shares.gather(1, chosen)[top:].sum(-1).mean(), shares.topk(top).values[top:].sum(-1).mean()))

    handles = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return tuple(float(torch.stack(part).mean()) for part in zip(*found))


@pytest.mark.parametrize("make", [dense, released])
def test_an_indexer_that_starts_as_the_attention_finds_what_it_looks_at(make):
    model = make()
    got = {start: mass(sparse.convert(model, 8, 4, 24, start=start, rows=rows(12, 48)), LONG, 8) for start in ("attention", "random")}
    most = got["attention"][1]
    assert got["attention"][0] > got["random"][0] + 0.4 * (most - got["random"][0])


def test_its_scores_are_those_of_the_attention():
    """One head of each, a key as wide as all that attention reads: where both are above zero the index's product is the head's score,
    up to each token's scale."""
    model = tiny(num_attention_heads=1, num_key_value_heads=1)
    made = sparse.convert(latent.convert(model, 9, 8, rows(12, 48)), 8, 1, 16, 33, rows=rows(12, 48))
    attention = made.model.layers[1].self_attn
    from karui.trainers.model import ATTENTION, register_attention
    from karui.trainers.sparse import LeanSparse, install_sparse_attention

    register_attention()
    made.set_attn_implementation(ATTENTION)
    install_sparse_attention(made)
    lean = attention.forward
    assert isinstance(lean, LeanSparse)
    seen = {}
    handle = attention.register_forward_pre_hook(lambda m, a, kw: seen.update(kw), with_kwargs=True)
    with torch.no_grad():
        made(LONG, use_cache=False)
        handle.remove()
        x, turn = seen["hidden_states"], tuple(t[0] for t in seen["position_embeddings"])
        residual = attention.q_a_layernorm(attention.q_a_proj(x))
        q, k, _ = lean._projected(x, residual, turn)
        iq, ik, iw = lean._index(x[0], residual[0], turn)
    theirs = (q @ k.mT * attention.scaling)[0, 0]
    ours = iq[:, 0] @ ik.T * 16**-0.5
    late = torch.ones_like(ours).tril().bool()
    late[:8] = False
    rank = torch.corrcoef(torch.stack([(ours - ours.mean(-1, keepdim=True))[late], (theirs - theirs.mean(-1, keepdim=True))[late]]))[0, 1]
    assert float(rank) > 0.9
    assert float(iw.mean()) == pytest.approx(sparse.LIT, rel=0.2)


def test_sizes_and_the_cache_are_counted():
    model = dense()
    made = sparse.convert(model, 16, 4, 16, rows=rows())
    assert size_of(made.config).parameters == sum(p.numel() for p in made.parameters())
    assert "KV cache 224 -> 352 bytes a token" in describe(model.config, made.config)
    assert sparse.convert(model.to(torch.bfloat16), 16, 4, 16, rows=rows()).model.layers[0].self_attn.indexer.wk.weight.dtype == torch.bfloat16


def test_bad_requests_are_named():
    config = dense().config
    with pytest.raises(UnsupportedError, match="knows models of type deepseek_v3; this one is 'llama'. Put {method: mla} before it"):
        sparse.plan(tiny().config, 8, 4, 16)
    with pytest.raises(UnsupportedError, match="a deepseek_v32 has it already"):
        sparse.plan(sparse.plan(config, 8, 4, 16), 8, 4, 16)
    with pytest.raises(KaruiError, match="top_k is 64; expected 1 to 63"):
        sparse.plan(config, 64, 4, 16)
    with pytest.raises(KaruiError, match="index_heads is 0; expected 1 or more"):
        sparse.plan(config, 8, 0, 16)
    with pytest.raises(KaruiError, match="index_head_dim is 6; expected 8 or more"):
        sparse.plan(config, 8, 4, 6)
    with pytest.raises(KaruiError, match="query_rank is 34; expected 2 to 33"):
        sparse.plan(config, 8, 4, 16, 34)
    with pytest.raises(KaruiError, match="queries have a latent of 24 already"):
        sparse.plan(released().config, 8, 4, 16, 12)
    with pytest.raises(UnsupportedError, match="rope_interleave: false"):
        sparse.plan(released(rope_interleave=False).config, 8, 4, 16)
    with pytest.raises(KaruiError, match="needs calibration text"):
        sparse.convert(dense(), 8, 4, 16)
