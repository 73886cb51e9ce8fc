"""Reference: VeRA, IA3, prompt and prefix tuning on packed rows against peft's own forward on single documents, and their files."""

import pytest
import torch
from peft import PeftModel

from karui.adapters.files import adapter_values, load_adapter, load_values, save_adapter
from karui.adapters.ia3 import attach_ia3
from karui.adapters.soft_prompt import attach_prompt, install
from karui.adapters.vera import attach_vera
from karui.configs.errors import KaruiError
from karui.configs.steps import Ia3Step, PromptStep, VeraStep
from karui.trainers.data import Sample, collate
from karui.trainers.model import ATTENTION, LossSum, register_attention
from tests.adapters.test_lora import tiny

KINDS = {
    "vera": lambda m: attach_vera(m, VeraStep(method="vera", rank=8)),
    "ia3": lambda m: attach_ia3(m, Ia3Step(method="ia3")),
    "prompt": lambda m: attach_prompt(m, PromptStep(method="prompt", tokens=3)),
    "prefix": lambda m: attach_prompt(m, PromptStep(method="prefix", tokens=3)),
}


def packed_tiny():
    register_attention()
    model = tiny()
    model.set_attn_implementation(ATTENTION)
    return model


def documents():
    g = torch.Generator().manual_seed(2)
    out = []
    for n in (5, 1, 9, 4):
        ids = torch.randint(3, 64, (n,), generator=g).int().numpy()
        mask = torch.ones(n, dtype=torch.bool).numpy()
        mask[0] = False
        out.append(Sample(ids=ids, loss_mask=mask, source_row=0))
    return out


def moved(model):
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g) * 0.3)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_packed_loss_and_gradients_are_pefts_on_single_documents(kind, tmp_path):
    ours = moved(KINDS[kind](packed_tiny()))
    loss = LossSum(ours, 1024).of(collate(documents()))
    loss.backward()
    save_adapter(ours, tmp_path / "a", base="", base_name="tiny")
    peer = PeftModel.from_pretrained(tiny(), tmp_path / "a", is_trainable=kind in ("vera", "ia3"))
    for name, parameter in peer.named_parameters():  # peft refuses to load a trainable prompt
        if "prompt_encoder" in name:
            parameter.requires_grad_()
    total = 0.0
    for d in documents():
        if len(d) > 1:
            ids = torch.tensor(d.ids).long().unsqueeze(0)
            logits = peer(input_ids=ids).logits[0, -len(d):-1]  # those of a prompt's own rows come first
            total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    total.backward()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    ours_grads = {n: p.grad for n, p in ours.named_parameters() if p.requires_grad}
    peers = {n: p.grad for n, p in peer.named_parameters() if p.requires_grad}
    assert ours_grads.keys() == peers.keys() and peers
    for name, grad in peers.items():
        assert float(grad.abs().max()) > 0
        assert torch.allclose(ours_grads[name], grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_files_load_here_and_what_is_loaded_is_what_was_saved(kind, tmp_path):
    model = moved(KINDS[kind](packed_tiny()))
    wanted = float(LossSum(model, 64).of(collate(documents())).detach())
    save_adapter(model, tmp_path / "a", base="", base_name="tiny")
    again = KINDS[kind](packed_tiny())
    load_values(again, adapter_values(tmp_path / "a"), "a")
    assert float(LossSum(again, 64).of(collate(documents()))) == wanted
    loaded = load_adapter(packed_tiny(), tmp_path / "a")
    assert float(LossSum(loaded, 64).of(collate(documents()))) == pytest.approx(wanted, rel=1e-6)
    save_adapter(again, tmp_path / "b", base="", base_name="tiny")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_do_not_see_one_another(kind):
    from karui.trainers.data import prove_isolation

    model = moved(KINDS[kind](packed_tiny())).eval()
    loss = LossSum(model, 64)
    assert prove_isolation(lambda b: loss.hidden(b.tokens, b.positions, b.cu_seqlens), collate(documents())) < 1e-6


class Tokens:
    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(c) % 60 for c in text]}


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_a_start_from_a_text_is_the_model_after_that_text(kind):
    """The loss of each document, packed, against the plain model's with the text's tokens before the document."""
    model = attach_prompt(packed_tiny(), PromptStep(method=kind, tokens=5, text="abc"), Tokens()).eval()
    ours = float(LossSum(model, 64).of(collate(documents())).detach())
    before, plain, total = torch.tensor([ord(c) % 60 for c in "abcab"]), tiny().eval(), 0.0
    for d in documents():
        ids = torch.tensor(d.ids).long()
        logits = plain(input_ids=torch.cat([before, ids]).unsqueeze(0)).logits[0, len(before):-1]
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").detach())
    assert ours == pytest.approx(total, rel=1e-5)


def test_a_prefix_without_a_text_is_of_the_size_of_what_the_layers_see():
    """Each seed draws other tokens; peft's normal random numbers would be up to a hundred times as large as this model's keys."""
    tables = []
    for seed in (0, 0, 1):
        base = packed_tiny()
        torch.manual_seed(seed)
        tables.append(attach_prompt(base, PromptStep(method="prefix", tokens=4)).prompt_encoder["default"].embedding.weight)
    assert torch.equal(tables[0], tables[1]) and not torch.equal(tables[0], tables[2])
    cache = tiny().eval()(input_ids=torch.arange(3, 23).unsqueeze(0), use_cache=True).past_key_values
    largest = max(float(t.abs().max()) for layer in cache.layers for t in (layer.keys, layer.values))
    assert 0 < float(tables[0].abs().max()) < 2 * largest


def test_a_prompt_starts_from_a_text():
    base = tiny()
    model = attach_prompt(base, PromptStep(method="prompt", tokens=5, text="abc"), Tokens())
    rows = [ord(c) % 60 for c in "abcab"]
    assert torch.equal(model.prompt_encoder["default"].embedding.weight, base.get_input_embeddings().weight[rows])
    with pytest.raises(KaruiError, match="no tokens"):  # of a tokenizer that drops them
        attach_prompt(tiny(), PromptStep(method="prompt", text=" "), lambda text, add_special_tokens: {"input_ids": []})


def test_names_that_match_nothing_are_refused():
    with pytest.raises(KaruiError, match="Did you mean 'k_proj'"):
        attach_ia3(tiny(), Ia3Step(method="ia3", targets=("k_prj",)))
    with pytest.raises(KaruiError, match="not among the targets"):
        attach_ia3(tiny(), Ia3Step(method="ia3", targets=("k_proj",)))


def test_an_ordinary_batch_goes_pefts_way():
    model = moved(attach_prompt(tiny(), PromptStep(method="prompt", tokens=2))).eval()
    ids = torch.arange(3, 9).unsqueeze(0)
    once = model(input_ids=ids).logits
    install(model)  # twice does no harm to ordinary calls
    assert torch.equal(model(input_ids=ids).logits, once)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_recomputed_layers_see_the_same_virtual_tokens(kind):
    from karui.trainers.model import enable_recompute

    plain = moved(KINDS[kind](packed_tiny())).train()
    again = moved(KINDS[kind](packed_tiny())).train()
    enable_recompute(again)
    for model in (plain, again):
        LossSum(model, 64).of(collate(documents())).backward()
    a, b = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (plain, again))
    assert all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-7) for n in a)


@pytest.mark.parametrize("kind", [*KINDS, "lora", "dora", "whole"])
def test_the_predicted_size_is_the_size(kind):
    from karui.adapters.lora import attach
    from karui.adapters.size import adapter_size
    from karui.configs.steps import LoraStep

    loras = {"lora": {}, "dora": {"dora": True}, "whole": {"train_also": ("embed_tokens", "input_layernorm")}}
    steps = {"vera": VeraStep(method="vera", rank=8), "ia3": Ia3Step(method="ia3"), "prompt": PromptStep(method="prompt", tokens=3),
             "prefix": PromptStep(method="prefix", tokens=3)}
    step = steps.get(kind) or LoraStep(method="lora", rank=4, **loras[kind])
    model = KINDS[kind](tiny()) if kind in KINDS else attach(tiny(), step).model
    assert adapter_size(tiny(), step)[1] == sum(p.numel() for p in model.parameters() if p.requires_grad)
