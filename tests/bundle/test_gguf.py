"""Reference: GGUF files hold the bundle's values by the gguf package's own decoder; llama.cpp runs them (peer)."""

import json
import os
import subprocess
from pathlib import Path

import gguf as official
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from karui.catalogue import resolve
from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle import export_model, gguf, open_model
from karui.inference.loading import load_tokenizer
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from tests.bundle.conftest import make_folder

EXACT = {
    "w4g32": "Q4_0", "w4g64": "Q4_0", "w4": "Q4_0", "w4t": "Q4_0", "w3g32": "Q4_0", "w2g64": "Q4_0", "w8g32": "Q8_0",
    "w8": "Q8_0",
    "w5g32": "Q8_0", "w4g32a": "Q8_0", "w2ta": "Q8_0", "w7a": "Q8_0", "w1.58": "TQ2_0", "w1.58g256": "TQ2_0", "w1.58g64": "Q4_0",
    "w1": "Q4_0", "w8a8": "Q8_0",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path / "cache"))


def decoded(q, kind):
    return dequantize(gguf.to_blocks(q, kind), official.GGMLQuantizationType[kind])


@given(spec=st.sampled_from(sorted(EXACT)), rows=st.integers(1, 4), blocks=st.integers(1, 2), seed=st.integers(0, 10**6))
@settings(max_examples=120)
def test_blocks_hold_every_value_exactly(spec, rows, blocks, seed):
    w = torch.randn(rows, 256 * blocks, generator=torch.Generator().manual_seed(seed))
    q = quantize(w, QuantSpec.parse(spec))
    kind = gguf.block_type("w", q)
    assert kind == EXACT[spec]
    assert np.array_equal(decoded(q, kind), q.dequantize().numpy())


def test_ternary_rows_that_256_does_not_divide_still_fit():
    q = quantize(torch.randn(3, 576), QuantSpec.parse("w1.58"))
    assert gguf.block_type("w", q) == "Q4_0" and np.array_equal(decoded(q, "Q4_0"), q.dequantize().numpy())


def test_codes_come_back_as_the_same_tensor():
    for spec, kind, unpack in (("w4g32", "Q4_0", gguf._q4_0), ("w8g32", "Q8_0", gguf._q8_0), ("w1.58g256", "TQ2_0", gguf._tq2_0)):
        q = quantize(torch.randn(5, 512), QuantSpec.parse(spec))
        scale, codes = unpack(gguf.to_blocks(q, kind))
        assert np.array_equal(codes, q.codes.numpy()) and np.array_equal(scale, q.scale.numpy()) and codes.dtype == np.int8


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("nf4", "holds nf4 exactly"),
        ("fp8", "holds fp8 exactly"),
        ("w4g16", "32 wide"),
        ("w8a", "9 bits"),
        ("w4g64:fp32", "no fp16 numbers.*use w4g64"),
    ],
)
def test_grids_gguf_cannot_hold(spec, match):
    q = quantize(torch.randn(4, 64), QuantSpec.parse(spec))
    with pytest.raises(UnsupportedError, match=f"layer.3: .*{match}"):
        gguf.block_type("layer.3", q)


@pytest.mark.parametrize(
    ("kind", "tied"), [("llama", True), ("llama", False), ("mistral", False), ("qwen2", True), ("qwen3", True)]
)
def test_through_the_file(tmp_path, kind, tied):
    source = make_folder(tmp_path / "model", kind, tied, hidden_size=64, intermediate_size=96, head_dim=16)
    export_model(source, {"*.mlp.*": "w4g32", "*.q_proj": "w8g32", "*.k_proj": "w4g32"}, tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    gguf.write(bundle, tmp_path / "m.gguf")
    opened = open_model(tmp_path / "m.gguf")
    assert set(opened.names) == set(bundle.names) and opened.tied == bundle.tied
    for name, w in bundle.weights().items():
        got = opened.weight(name)
        assert isinstance(got, QTensor) == isinstance(w, QTensor)
        if isinstance(w, QTensor) and w.spec.granularity == "group":
            assert got.spec == w.spec and torch.equal(got.codes, w.codes) and torch.equal(got.scale, w.scale)
            assert opened.packed(name)["codes"].equal(bundle.packed(name)["codes"])
        values = [x.dequantize() if isinstance(x, QTensor) else x for x in (got, w)]
        assert torch.equal(*values)
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps"):
        assert opened.config[key] == bundle.config[key], key
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_transformers_reads_the_file(tmp_path):
    """Also an independent check of the q/k row order and of the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_folder(tmp_path / "model", hidden_size=64, intermediate_size=96)
    export_model(source, "w4g32", tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    gguf.write(bundle, tmp_path / "m.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").eval()
    ours = AutoModelForCausalLM.from_pretrained(source).eval()
    ours.load_state_dict({n: w.dequantize() if isinstance(w, QTensor) else w for n, w in bundle.weights().items()}, strict=False)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-4
    first = AutoTokenizer.from_pretrained(source)
    second = AutoTokenizer.from_pretrained(open_model(tmp_path / "m.gguf").tokenizer_path)
    text = "the 12 in  the\n<|im_start|>né"
    assert first(text).input_ids == second(text).input_ids and first.chat_template == second.chat_template
    assert first.eos_token_id == second.eos_token_id


def test_refusals(tmp_path, tiny_folder):
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(KaruiError, match="exists already"):
        gguf.write(open_model(tiny_folder), tmp_path / "x.gguf")
    export_model(tiny_folder, {"*.down_proj": "w4g16"}, tmp_path / "b")
    with pytest.raises(UnsupportedError, match="layers.0.mlp.down_proj.weight: GGUF blocks are 32 wide"):
        gguf.write(open_model(tmp_path / "b"), tmp_path / "y.gguf")
    assert not (tmp_path / "y.gguf").exists() and not list(tmp_path.glob(".y*"))
    opened = open_model(tiny_folder)
    opened.config = {**opened.config, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}
    with pytest.raises(UnsupportedError, match="RoPE scaling"):
        gguf.write(opened, tmp_path / "y.gguf")
    opened.config = {**opened.config, "model_type": "gemma"}
    with pytest.raises(UnsupportedError, match="'gemma' is not written"):
        gguf.write(opened, tmp_path / "y.gguf")
    with pytest.raises(UnsupportedError, match=r"\['Whitespace'\] is none llama.cpp"):
        gguf.pre_tokenizer({"pre_tokenizer": {"type": "Whitespace"}})


def test_a_vocabulary_without_merges(tmp_path):
    """The gguf package leaves an empty list out of the file."""
    folder = make_folder(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    gguf.write(open_model(folder), tmp_path / "m.gguf")
    tokenizer = load_tokenizer(gguf.read(tmp_path / "m.gguf").tokenizer_path)
    assert tokenizer.encode("the") == load_tokenizer(folder).encode("the") and len(tokenizer.encode("the")) == 3


def test_pre_tokenizers_by_name():
    from karui.catalogue.gguf_model import SPLIT, build_tokenizer

    for name in ("smollm", "gpt-2", *SPLIT):
        meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": ["a", "b"],
                "tokenizer.ggml.merges": [], "general.architecture": "llama"}  # fmt: skip
        assert gguf.pre_tokenizer(json.loads(build_tokenizer(meta)[0].to_str())) == name


LLAMA_CPP = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
request = json.load(sys.stdin)
out = {"ids": [model.tokenize(t.encode(), add_bos=False, special=True) for t in request["texts"]], "answers": []}
for prompt in request["prompts"]:
    answer = []
    for token in model.generate(prompt, temp=0.0):
        answer.append(token)
        if len(answer) == request["count"]:
            break
    model.reset()
    out["answers"].append(answer)
print(json.dumps(out))
"""


@pytest.mark.peer
@pytest.mark.parametrize("grid", ["w4g32", "w8"])
def test_llama_cpp_runs_it(tmp_path, monkeypatch, grid):
    """Greedy tokens and tokenization. llama.cpp rounds activations to 8 bits, so only clear decisions can be compared."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    python = Path(os.environ.get("KARUI_PEERS", "nowhere")) / "llama_cpp" / "bin" / "python"
    if not python.exists():
        pytest.skip("peer not installed: set KARUI_PEERS to a folder of venvs with llama_cpp in it")
    monkeypatch.delenv("KARUI_CACHE")
    source = resolve("smollm2-135m")
    export_model(source, grid, tmp_path / "b")
    bundle = open_model(tmp_path / "b")
    gguf.write(bundle, tmp_path / "m.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [
        "Hello 1234 world",
        "naïve 日本 🙂  ½ ²",
        "def f(x):\n\treturn x\n\n",
        "<|im_start|>user\nhi<|im_end|>",
        "it's  we'll",
    ]
    questions = ["What is the capital of Japan?", "What is 2 + 2?", "Name a colour."]
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True).input_ids
        for q in questions
    ]
    request = json.dumps({"texts": texts, "prompts": chats, "count": 12})
    done = subprocess.run(
        [python, "-c", LLAMA_CPP, tmp_path / "m.gguf"], input=request, capture_output=True, text=True, check=True
    )
    out = json.loads(done.stdout)
    assert out["ids"] == [tokenizer(t).input_ids for t in texts]
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    model.load_state_dict({n: w.dequantize() if isinstance(w, QTensor) else w for n, w in bundle.weights().items()}, strict=False)
    compared = 0
    for prompt, answer in zip(chats, out["answers"]):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        for step, token in enumerate(answer):
            if best[step, 0] - best[step, 1] > 1.0:
                compared += 1
                assert token == int(logits[step].argmax()), (prompt, step)
            else:
                assert best[step, 0] - logits[step, token] < 1.0, "never a token the model finds clearly worse"
    assert compared >= 12
