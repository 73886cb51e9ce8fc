"""Fixtures: a tiny random llama written as GGUF by the gguf package, and the real model."""

import numpy as np
import pytest
import torch

from karui.catalogue import resolve
from karui.configs.errors import KaruiError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_alphabet():
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path, model, architecture="llama", pre="smollm", extra=()):
    """llama.cpp's layout, spelled out here a second time: names, q/k row order, keys."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    tokens = SPECIAL + byte_alphabet() + ["th", "the", "Ġthe", "in", "ĠĠ", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["t h", "th e", "Ġ the", "i n", "Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    short = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        array = value.float().numpy()
        if stem in outer:
            if stem == "lm_head" and config.tie_word_embeddings:
                continue
            target = outer[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{short[part]}"
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
                half = array.shape[0] // heads // 2
                order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in range(2)]
                array = array[order]
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(array))
    for name, array in extra:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_model(kind="llama", tied=True, **overrides):
    import transformers

    torch.manual_seed(0)
    shape = dict(
        vocab_size=len(SPECIAL) + 256 + 6, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, rope_theta=10000.0, rms_norm_eps=1e-5,
    )  # fmt: skip
    shape |= overrides
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    classes = {k: (f"{n}Config", f"{n}ForCausalLM") for k, n in names.items()}
    config_class, model_class = (getattr(transformers, n) for n in classes[kind])
    model = model_class(config_class(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    return model.eval()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no network: the hub is refused and pip is not called unless a test says so."""
    monkeypatch.setenv("KARUI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("karui.catalogue.resolver._hub_cached", lambda repo: None)
    monkeypatch.delenv("KARUI_CATALOGUE_SOURCE", raising=False)
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model())


@pytest.fixture(scope="session")
def smollm2():
    try:
        return resolve("smollm2-135m")
    except KaruiError as error:
        pytest.skip(f"the model is not to be had here: {error}")
