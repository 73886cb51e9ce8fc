"""Unit and reference tests of pruning: what is left computes what the whole did where nothing was lost, and loads as a folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from karui.configs.errors import KaruiError, UnsupportedError
from karui.distill.prune import sparsegpt, wanda
from karui.distill.prune.experts import prune_experts, router_use
from karui.distill.prune.layers import block_influence, drop_layers, keep_layers
from karui.distill.prune.sparse import METHODS, prune_sparse, read_pattern
from karui.distill.prune.width import importance, prune_width
from karui.distill.routers import find_routers


def llama(tied=True, **options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{
        "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": tied, **options})).eval()


def rows(n=3, length=20, vocab=40):
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=g) for _ in range(n)]


def logits(model):
    with torch.no_grad():
        return model(torch.arange(9).unsqueeze(0)).logits


def reloaded(model, folder):
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(logits(again), logits(model))
    return again


def test_dropped_layers_leave_a_model_folder(tmp_path):
    model = llama()
    third = model.model.layers[2]
    done = drop_layers(model, 3)
    assert done.kept_layers == (0, 2, 4) and model.model.layers[1] is third
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    assert reloaded(model, tmp_path).config.num_hidden_layers == 3


LATENT = dict(num_key_value_heads=6, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
              n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=16, n_group=1, topk_group=1)
INDEXED = dict(LATENT, index_n_heads=4, index_head_dim=16, index_topk=4)


@pytest.mark.parametrize(("kind", "options"), [
    ("deepseek_v3", dict(LATENT, first_k_dense_replace=2)), ("deepseek_v32", dict(INDEXED, first_k_dense_replace=1)),
    ("glm_moe_dsa", dict(INDEXED, first_k_dense_replace=3, indexer_types=["full", "shared", "full", "shared", "full"])),
    ("gemma3_text", dict(sliding_window=4, sliding_window_pattern=2)), ("olmo3", dict(sliding_window=4)),
    ("qwen3_moe", dict(num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[3])),
])
def test_layers_keep_their_kind(kind, options, tmp_path, first_of_equals):
    """Dense or experts, window or none, indexer or none: the kept layers are what they were, in the folder, too, and the engine
    computes what transformers does."""
    from karui.inference.bundle.reader import open_model
    from karui.inference.models.config import from_hf
    from karui.inference.models.decoder import TorchRunner
    from tests.inference.conftest import tiny
    from tests.inference.test_decoder import batch_of

    model = tiny(kind, num_hidden_layers=5, pad_token_id=0, **options)[0]
    drop_layers(model, 3)
    again = reloaded(model, tmp_path)
    opened = open_model(tmp_path)
    runner = TorchRunner(from_hf(opened.config), dict(opened.weights()))
    runner.allocate(4, 4, "float32")
    assert (runner.forward(batch_of((list(range(9)), 0, [0, 1, 2]))).logits - logits(again)[0]).abs().max() < 1e-4


def test_a_layer_that_does_nothing_has_no_influence_and_goes_first():
    model = llama()
    idle = model.model.layers[3]
    with torch.no_grad():
        idle.self_attn.o_proj.weight.zero_()
        idle.mlp.down_proj.weight.zero_()
    before = logits(model)
    influence = block_influence(model, rows())
    assert influence[3] == pytest.approx(0, abs=1e-9) and min(v for i, v in enumerate(influence) if i != 3) > 1e-4
    assert drop_layers(model, 4, rows(), "influence").kept_layers == (0, 1, 2, 4)
    torch.testing.assert_close(logits(model), before)


@pytest.mark.parametrize("tied", [True, False])
def test_width_drops_what_carries_nothing(tied, tmp_path):
    model = llama(tied)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[::3].zero_()
            layer.self_attn.v_proj.weight[:8].zero_()
    before = logits(model)
    done = prune_width(model, rows(), intermediate=32, kv_heads=1)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)
    assert "intermediate 48 -> 32" in done.lines[0] and model.config.head_dim == 8
    again = reloaded(model, tmp_path)
    assert again.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)


def test_hidden_channels_go_everywhere(tmp_path):
    for tied in (True, False):
        model = llama(tied)
        size = sum(p.numel() for p in model.parameters())
        prune_width(model, rows(), hidden=24)
        again = reloaded(model, tmp_path / str(tied))
        assert sum(p.numel() for p in again.parameters()) < size and again.config.hidden_size == 24
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


def test_the_channels_kept_are_those_that_carry_most():
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 4:] *= 1e-3
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    kept = model.model.embed_tokens.weight[:, :4].clone()
    prune_width(model, rows(), hidden=4)
    assert torch.equal(model.model.embed_tokens.weight, kept)


def layer_inputs(width=64, tokens=400, rows=24, seed=3):
    """A weight [rows, width] and correlated, uneven inputs [tokens, width] for it."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 16, generator=g) @ torch.randn(16, width, generator=g) + 0.1 * torch.randn(tokens, width, generator=g)
    return torch.randn(rows, width, generator=g), x * torch.exp(0.5 * torch.randn(width, generator=g))


def pruned_by(method, w, x, share, n=0, m=0):
    """(the pruned weight, its mask), of one linear alone."""
    w = w.clone()
    if method == "sparsegpt":
        return w, sparsegpt.prune_matrix(w, x.T @ x, share, n, m)
    return w, wanda.prune_matrix(w, None if method == "magnitude" else x.norm(dim=0), share, n, m)


def test_importances_may_come_from_elsewhere():
    model = llama()
    scores = {k: torch.zeros_like(v) for k, v in importance(model, rows(), 8).items()}
    for i in range(5):
        scores[f"{i}.neurons"][i : i + 16] = 1
        scores[f"{i}.heads"][2:] = 1
    wanted = [(layer.mlp.down_proj.weight[:, i : i + 16].clone(), layer.self_attn.k_proj.weight[8:].clone())
              for i, layer in enumerate(model.model.layers)]
    prune_width(model, (), intermediate=16, kv_heads=1, scores=scores)
    for layer, (down, k) in zip(model.model.layers, wanted):
        assert torch.equal(layer.mlp.down_proj.weight, down) and torch.equal(layer.self_attn.k_proj.weight, k)


@pytest.mark.parametrize("pattern", [0.5, "2:4", "4:8", 0.3])
def test_the_output_errs_as_the_papers_order_the_methods(pattern):
    w, x = layer_inputs()
    share, n, m = read_pattern(pattern)
    errors = {}
    for method in METHODS:
        ours, mask = pruned_by(method, w, x, share, n, m)
        assert bool((ours[~mask] == 0).all()) and float((~mask).float().mean()) == pytest.approx(share, abs=0.01)
        assert method == "sparsegpt" or torch.equal(ours, w * mask)
        if m:
            assert bool((mask.view(24, -1, m).sum(-1) == m - n).all())
        errors[method] = float((x @ (ours - w).T).square().sum())
    assert errors["sparsegpt"] < 0.5 * errors["wanda"] and errors["wanda"] < 0.9 * errors["magnitude"]


def naive_obs(w, h, share, n, m, damping=0.01, block=sparsegpt.BLOCK):
    """Optimal brain surgeon, column by column in float64: no Cholesky factor, a fresh inverse of what is open for every column."""
    width = w.shape[1]
    h = h.double() + damping * h.double().diagonal().mean() * torch.eye(width, dtype=torch.float64)
    inverses = [torch.linalg.inv(h[j:, j:]) for j in range(width)]
    price = torch.stack([inverse[0, 0] for inverse in inverses])
    work, kept = w.double().clone(), torch.ones(w.shape, dtype=torch.bool)
    for j in range(width):
        span = slice(j, j + m) if m and j % m == 0 else slice(j, min(j + block, width)) if not m and j % block == 0 else None
        if span is not None:
            cost = work[:, span].square() / price[span]
            if m:
                for row in range(len(w)):
                    kept[row, j + cost[row].sort().indices[:n]] = False
            else:
                bar = cost.flatten().sort().values[round(share * cost.numel()) - 1]
                kept[:, span] = cost > bar
        gone = torch.where(kept[:, j], 0.0, work[:, j])
        work[:, j:] -= (gone / price[j])[:, None] * inverses[j][0][None, :]
    return work * kept, kept


@pytest.mark.parametrize(("pattern", "width"), [(0.5, 64), (0.5, 160), ("2:4", 160), ("4:8", 64)])
def test_sparsegpt_is_the_surgeon_that_inverts_anew(pattern, width):
    w, x = layer_inputs(width)
    share, n, m = read_pattern(pattern)
    ours, mask = pruned_by("sparsegpt", w, x, share, n, m)
    wanted, kept = naive_obs(w, (x.T @ x), share, n, m)
    assert float((mask != kept).float().mean()) < 0.002  # float32 against float64 may part at an equal saliency
    same = (mask == kept).all(1)
    assert bool(same.any())
    torch.testing.assert_close(ours[same].double(), wanted[same], rtol=1e-3, atol=1e-3)


def test_wanda_by_its_own_words():
    """The paper's algorithm 1: a row's scores are sorted, the lower half of them goes."""
    w, x = layer_inputs()
    ours, mask = pruned_by("wanda", w, x, 0.5)
    for row in range(len(w)):
        score = [abs(float(w[row, j])) * float(x[:, j].square().sum()) ** 0.5 for j in range(64)]
        least = sorted(range(64), key=lambda j: score[j])[:32]
        assert {j for j in range(64) if not mask[row, j]} == set(least)
    _, mask = pruned_by("magnitude", w, x, 0.5)
    assert w.abs()[mask].min() >= w.abs()[~mask].max() and len(set(mask.sum(1).tolist())) > 1


def test_a_single_pruned_column_gets_the_best_repair():
    """With one weight left out of a row, the others must be the least-squares solution: OBS, found here by a solver."""
    g = torch.Generator().manual_seed(4)
    x, w = torch.randn(200, 6, generator=g).double(), torch.randn(1, 6, generator=g)
    w[0, 0] = 1e-3  # the first column is the least salient, so everything to its right may move
    ours = w.clone()
    mask = sparsegpt.prune_matrix(ours, (x.T @ x).float(), 1 / 6, damping=0.0)
    assert mask.tolist() == [[False, True, True, True, True, True]]
    best = torch.linalg.lstsq(x[:, 1:], x @ w[0].double()).solution
    torch.testing.assert_close(ours[0, 1:].double(), best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_sparse_model_is_masked_layer_after_layer(method, tmp_path):
    model = llama()
    done = prune_sparse(model, () if method == "magnitude" else rows(), "2:4", method)
    assert len(done.masks) == 5 * 7
    for name, mask in done.masks.items():
        assert bool((model.get_parameter(name)[~mask] == 0).all())
    assert f"{method} 2:4" in done.lines[0] and "(50.0 %)" in done.lines[0]
    assert ("60 tokens" in done.lines[0]) == (method != "magnitude")
    reloaded(model, tmp_path)


def test_a_layer_is_calibrated_on_what_the_pruned_ones_before_it_give():
    """Wanda's second layer alone, from the inputs that the finished model hands it."""
    model, second = llama(num_hidden_layers=2), llama(num_hidden_layers=2)
    prune_sparse(model, rows(), 0.5, "wanda")
    seen = []
    keep = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    for row in rows():
        model(row.unsqueeze(0))
    keep.remove()
    alone = second.model.layers[1].self_attn.q_proj.weight
    wanda.prune_matrix(alone, torch.cat(seen).norm(dim=0), 0.5)
    assert torch.equal(alone, model.model.layers[1].self_attn.q_proj.weight)


def moe():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=6, num_experts_per_tok=2, head_dim=8, norm_topk_prob=True)).eval()


def test_fewer_experts_are_a_model_folder(tmp_path):
    model = moe()
    done = prune_experts(model, rows(), 4)
    assert model.config.num_local_experts == 4 and len(done.lines) == 2
    again = reloaded(model, tmp_path)
    assert again.model.layers[0].mlp.experts.down_proj.shape[0] == 4


def test_the_most_used_experts_are_kept():
    model = moe()
    mass = {name: mass for name, (mass, _) in router_use(model, rows()).items()}
    sizes = [layer.mlp.experts.down_proj.detach().flatten(1).norm(dim=1).double() for layer in model.model.layers]
    wanted = [sorted((-(mass[f"model.layers.{i}.mlp"] * sizes[i])).argsort()[:3].tolist()) for i in range(2)]
    old = [layer.mlp.experts.down_proj.detach().clone() for layer in model.model.layers]
    prune_experts(model, rows(), 3)
    for i, layer in enumerate(model.model.layers):
        assert torch.equal(layer.mlp.experts.down_proj, old[i][wanted[i]])


def test_the_least_used_experts_go_or_any():
    model = moe()
    use = router_use(model, rows())
    counts = [use[f"model.layers.{i}.mlp"][1] for i in range(2)]
    chosen = []
    handle = model.model.layers[1].mlp.gate.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    for row in rows():
        model(row[None])
    handle.remove()
    assert torch.equal(counts[1], torch.bincount(torch.cat(chosen).flatten(), minlength=6).double())
    old = [layer.mlp.experts.down_proj.detach().clone() for layer in model.model.layers]
    prune_experts(model, rows(), 3, "count")
    for layer, before, count in zip(model.model.layers, old, counts):
        assert torch.equal(layer.mlp.experts.down_proj, before[(-count).argsort(stable=True)[:3].sort().values])
    drawn = [prune_experts(moe(), rows(), 3, "random", seed).lines for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("kind", ["minimax_m2", "ernie4_5_moe", "glm4_moe"])
def test_a_correction_bias_goes_with_its_expert(kind, tmp_path):
    """It may belong to the router, to a module in it, or to the block; experts are chosen by it, and weighed without it."""
    from tests.distill.test_balance import tiny as mixture_of

    model = mixture_of(kind).eval()
    router = find_routers(model)[0]
    bias = router.bias.detach().clone().flatten()
    mass, count = router_use(model, rows(vocab=64))[router.name]
    kept = count.argsort(descending=True, stable=True)[:3].sort().values
    assert float(mass.sum()) > 0 and float(count.sum()) == 60 * 2
    prune_experts(model, rows(vocab=64), 3, "count")
    assert torch.equal(find_routers(model)[0].bias.flatten(), bias[kept])
    reloaded(model, tmp_path)


def test_bad_requests_are_named():
    with pytest.raises(KaruiError, match="expected 1 to 4"):
        drop_layers(llama(), 5)
    with pytest.raises(KaruiError, match="not known"):
        drop_layers(llama(), 2, choice="random")
    with pytest.raises(KaruiError, match="needs calibration text"):
        drop_layers(llama(), 2, choice="influence")
    with pytest.raises(KaruiError, match="at least one of"):
        prune_width(llama(), rows())
    with pytest.raises(KaruiError, match="expected 1 to 48"):
        prune_width(llama(), rows(), intermediate=64)
    with pytest.raises(UnsupportedError, match="not built like llama"):
        prune_width(moe(), rows(), hidden=8)
    from tests.inference.conftest import tiny

    with pytest.raises(UnsupportedError, match="hidden channels of a gemma"):
        prune_width(tiny("gemma")[0], rows(), hidden=8)
    for kind in ("gemma2", "olmo2"):
        with pytest.raises(UnsupportedError, match="not built like llama"):
            prune_width(tiny(kind, pad_token_id=0)[0], rows(), intermediate=8)
    with pytest.raises(UnsupportedError, match="2 groups of experts"):
        prune_experts(tiny("deepseek_v3", first_k_dense_replace=1, **{**LATENT, "n_group": 2})[0], rows(), 2)
    shared = dict(INDEXED, first_k_dense_replace=3, indexer_types=["full", "shared", "full"])
    with pytest.raises(UnsupportedError, match="layer 1 has no indexer"):
        keep_layers(tiny("glm_moe_dsa", **shared)[0], [1, 2])
    with pytest.raises(UnsupportedError, match="no mixture"):
        prune_experts(llama(), rows(), 2)
    with pytest.raises(KaruiError, match=r"expected 2 \(experts per token\) to 5"):
        prune_experts(moe(), rows(), 1)
    with pytest.raises(KaruiError, match="experts by 'size' are not known; valid: score, count, random"):
        prune_experts(moe(), rows(), 3, "size")
    with pytest.raises(UnsupportedError, match="layer 0 holds its experts in one tensor"):
        prune_sparse(moe(), rows(), 0.5)
    with pytest.raises(KaruiError, match="'obc' is not known; valid: sparsegpt, wanda, magnitude"):
        prune_sparse(llama(), rows(), 0.5, "obc")
    with pytest.raises(KaruiError, match="wanda needs calibration text"):
        prune_sparse(llama(), [], 0.5, "wanda")
    with pytest.raises(KaruiError, match="down_proj: a width of 36 does not divide into groups of 8"):
        prune_sparse(model := llama(intermediate_size=36), rows(), "4:8", "magnitude")
    assert not any((p == 0).any() for n, p in model.named_parameters() if "proj" in n)  # nothing was touched
    with torch.no_grad():
        (broken := llama()).model.layers[1].mlp.gate_proj.weight[0, 0] = float("inf")
    with pytest.raises(KaruiError, match="inputs of model.layers.1.mlp.down_proj.weight hold NaN"):
        prune_sparse(broken, rows(), 0.5)
    for pattern in ("4:2", 1.5, "half", "3:5"):
        with pytest.raises(KaruiError, match="neither a share"):
            read_pattern(pattern)
