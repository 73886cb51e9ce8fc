"""GGUF -> an ordinary Hugging Face folder in fp32, in seconds.

`transformers` can load GGUF too, but takes several times as long and leaves a quantization config that
forbids saving. Here every tensor is dequantized by the `gguf` package, llama's q/k row order is undone, and config and
tokenizer are rebuilt from the metadata. The file format and the permutation:
llama.cpp, docs of GGUF v3 and `convert_hf_to_gguf.py` (`LlamaModel.permute`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from karui.configs.errors import CorruptError, UnsupportedError, nearest

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # gguf.TokenType
# The regular expressions that split text before BPE, as in llama.cpp (src/llama-vocab.cpp) and the models' own tokenizer.json.
SPLIT = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPLIT["llama-bpe"] = SPLIT["qwen2"].replace(r"\p{N}|", r"\p{N}{1,3}|")
_PRE = ("smollm", "gpt-2", "default", *SPLIT)


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (fp32), generation_config.json and the tokenizer's two files into `folder`.

    The folder is created; it must not exist. No quantization_config is left behind: the result is a plain model.

    Raises:
        UnsupportedError: an architecture, tensor, tokenizer or RoPE scaling that is not converted; names it.
        CorruptError: the file is not GGUF, is truncated or otherwise damaged; see `gguf_file.read`.
    """
    reader, meta = open_gguf(gguf_path)
    kind = meta["general.architecture"]
    config = model_config(meta, kind, {t.name for t in reader.tensors}, gguf_path.name)
    tokenizer = build_tokenizer(meta)

    folder.mkdir()
    _save_weights(reader, config, folder / "model.safetensors")
    save_tokenizer(*tokenizer, folder)
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: Any, settings: dict[str, Any], folder: Path) -> None:
    """Write what `build_tokenizer` made as tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def open_gguf(gguf_path: Path) -> tuple[Any, dict[str, Any]]:
    """(gguf.GGUFReader, its key-value pairs) of a file whose architecture karui knows; errors as in `convert`."""
    from karui.catalogue.gguf_file import read

    reader, meta = read(gguf_path)
    kind = meta.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise UnsupportedError(
            f"{gguf_path.name}: GGUF architecture {kind!r} is not converted; supported: {', '.join(ARCHITECTURES)}."
            f"{nearest(str(kind), ARCHITECTURES)}"
        )
    return reader, meta


def model_config(meta: dict[str, Any], kind: str, names: set[str], file: str) -> dict[str, Any]:
    """The Hugging Face config.json of a GGUF: `meta` its key-value pairs, `names` its tensors, `file` what errors call it."""

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{kind}.{key}", default)
        if value is None:
            raise CorruptError(f"{file}: the metadata lacks {kind}.{key}, without which the model cannot be rebuilt.")
        return value

    if meta.get(f"{kind}.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in names:
        raise UnsupportedError(f"{file}: RoPE scaling is not converted from GGUF; use the model's safetensors from the hub.")
    if (tokens := meta.get("tokenizer.ggml.tokens")) is None:
        raise CorruptError(f"{file}: the metadata lacks tokenizer.ggml.tokens, without which the model cannot be rebuilt.")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    theta = get("rope.freq_base", 10000.0)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "dtype": "float32",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", meta.get(f"{kind}.rope.dimension_count", hidden // heads)),
        "max_position_embeddings": get("context_length"),
        # Stored as fp32; its shortest decimal is the number the original config had.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "initializer_range": 0.02,
        "use_cache": True,
        **{
            f"{k}_token_id": meta.get(f"tokenizer.ggml.{g}_token_id")
            for k, g in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }


def _save_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    from safetensors.numpy import save_file

    from karui.catalogue.gguf_file import values

    weights: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        name = hf_name(tensor.name)
        rows = values(tensor)
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            heads = config["num_attention_heads"] if ".q_proj." in name else config["num_key_value_heads"]
            rows = unpermute(rows, heads)
        weights[name] = np.ascontiguousarray(rows)
    save_file(weights, path, metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; `UnsupportedError` for a tensor that has no place."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in BLOCK_NAMES:
        raise UnsupportedError(
            f"GGUF tensor {name!r} belongs to no part of the decoder karui converts; use the model's safetensors."
        )
    return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}.{match[3]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's interleaved q/k rows -> the half-split order of transformers. [heads * head_dim, ...] both ways; `CorruptError`
    for rows that are not those of so many heads."""
    if not rows.ndim or rows.shape[0] % (2 * heads):
        raise CorruptError(f"a q or k of shape {list(rows.shape)} is not that of {heads} heads; fetch the GGUF file again.")
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def build_tokenizer(meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(tokenizers.Tokenizer, contents of tokenizer_config.json) from the `tokenizer.*` metadata of a byte-level BPE GGUF."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in _PRE:
        raise UnsupportedError(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not converted; supported: byte-level BPE ('gpt2') "
            f"with {', '.join(_PRE)}. Use the model's own folder from the hub."
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta.get("tokenizer.ggml.merges", ())]  # files leave an empty list out
    types = meta.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    try:
        bpe = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises bare Exception
        raise CorruptError(f"the GGUF's vocabulary and merges do not fit together ({error}).") from error
    tokenizer = Tokenizer(bpe)
    if pre in SPLIT:
        from tokenizers import Regex

        split = pre_tokenizers.Split(Regex(SPLIT[pre]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, types) if kind == _USER_DEFINED])

    ids = {
        role: meta.get(f"tokenizer.ggml.{key}_token_id")
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    named = {role: tokens[i] for role, i in ids.items() if i is not None}
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", False))
    if add_bos and "bos" in named:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{named['bos']} $A", pair=f"{named['bos']} $A {named['bos']} $B", special_tokens=[(named["bos"], ids["bos"])]
        )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get(f"{meta['general.architecture']}.context_length"),
        **{f"{role}_token": token for role, token in named.items()},
        "additional_special_tokens": [t for t in special if t not in named.values()],
    }
    if template := meta.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return tokenizer, settings
