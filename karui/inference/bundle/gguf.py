"""GGUF v3: the format of llama.cpp. Reader and writer; codes go into its blocks as they are, nothing is quantized again.

    Q4_0    32 codes share an fp16 d, value = d * (q - 8)        int 4 and 3 bit, ternary, binary; scales of larger groups repeat
    Q8_0    32 codes share an fp16 d, value = d * q              the other int grids; affine ones as (code - zero)
    TQ2_0   256 ternary codes share an fp16 d                    ternary, when 256 divides the rows and the groups
    F32     all else

The values in the file are those of the bundle bit by bit, which is checked after writing. Grids that GGUF cannot hold exactly
(nf4, fp8, scales that are no fp16 numbers) are refused. Layouts: ggml-common.h and ggml-quants.c of llama.cpp. For llama, q and k
rows are put in llama.cpp's order (`catalogue.gguf_model.unpermute` is the way back).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from karui.catalogue import gguf_model
from karui.catalogue.store import cache_root, publish, staging
from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle.layout import check_finite, to_parts
from karui.inference.bundle.reader import Opened, Weight
from karui.inference.bundle.staging import fsync
from karui.kernels.qtensor import QTensor

log = logging.getLogger(__name__)
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_Q4_0, _Q8_0, _TQ2_0, _F32 = "Q4_0", "Q8_0", "TQ2_0", "F32"


def write(source: Opened, target: str | Path, *, name: str = "") -> Path:
    """Write a bundle (or a plain folder, as F32) as one .gguf file with its tokenizer.

    Args:
        source: an opened model of llama shape (llama, mistral, qwen2, qwen3) with a byte-level BPE tokenizer.
        target: the file to make; must not exist.
        name: `general.name` in the file; default: the folder's.

    Raises:
        UnsupportedError: an architecture, tokenizer, RoPE scaling or grid GGUF has no exact place for; names it.
        KaruiError: the target exists.
    """
    target = Path(target)
    if target.exists():
        raise KaruiError(f"{target} exists already; choose another output or remove it.")
    kind = source.config.get("model_type", "")
    if kind not in _ARCHITECTURES:
        raise UnsupportedError(f"model_type {kind!r} is not written as GGUF; supported: {', '.join(_ARCHITECTURES)}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        types = _write(source, temporary, _ARCHITECTURES[kind], name or source.path.name)
        _check(source, temporary)
        fsync(temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise KaruiError(f"{target} cannot be written: {error}. Nothing was left behind.") from error
    finally:
        temporary.unlink(missing_ok=True)
    counts = {t: list(types.values()).count(t) for t in sorted(set(types.values()))}
    log.info("%s: %s", target.name, ", ".join(f"{count} tensors {t}" for t, count in counts.items()))
    return target


def read(path: str | Path) -> Gguf:
    """Open a .gguf file. Q4_0, Q8_0 and TQ2_0 become `QTensor`s of the same codes; other types come out dequantized, in fp32."""
    path = Path(path)
    reader, meta = gguf_model.open_gguf(path)
    return Gguf(path, reader, meta)


class Gguf(Opened):
    """An opened GGUF file. Made by `read`. Its tokenizer is rebuilt once into the cache."""

    def __init__(self, path: Path, reader: Any, meta: dict[str, Any]) -> None:
        self.path = path
        self._tensors = {gguf_model.hf_name(t.name): t for t in reader.tensors}
        kind = meta["general.architecture"]
        self.config = gguf_model.model_config(meta, kind, {t.name for t in reader.tensors}, path.name)
        self.names = tuple(self._tensors)
        self.tied = (("model.embed_tokens.weight", "lm_head.weight"),) if self.config["tie_word_embeddings"] else ()
        self.tokenizer_path = _cached_tokenizer(meta)

    def spec(self, name: str) -> QuantSpec:
        tensor = self._get(name)
        spelling = {_Q4_0: "w4g32", _Q8_0: "w8g32", _TQ2_0: "w1.58g256"}.get(tensor.tensor_type.name, "none")
        return QuantSpec.parse(spelling if tensor.data.ndim == 2 else "none")

    def weight(self, name: str) -> Weight:
        from karui.catalogue.gguf_file import values

        tensor, spec = self._get(name), self.spec(name)
        heads = self._heads(name)
        if spec.format == "none" or (spec.bits == 8 and (_q8_0(tensor.data)[1] == -128).any()):
            rows = values(tensor)
            value = torch.from_numpy(np.array(gguf_model.unpermute(rows, heads) if heads else rows))
            check_finite(name, value)
            return value
        scale, codes = {_Q4_0: _q4_0, _Q8_0: _q8_0, _TQ2_0: _tq2_0}[tensor.tensor_type.name](tensor.data)
        if heads:
            scale, codes = gguf_model.unpermute(scale, heads), gguf_model.unpermute(codes, heads)
        q = QTensor(
            torch.from_numpy(np.ascontiguousarray(codes)), torch.from_numpy(np.ascontiguousarray(scale)), None, spec, codes.shape
        )
        check_finite(f"{name}.scale", q.scale)
        return q

    def packed(self, name: str) -> dict[str, torch.Tensor]:
        w = self.weight(name)
        return to_parts(w) if isinstance(w, QTensor) else {"": w}

    def nbytes(self) -> int:
        return self.path.stat().st_size

    def _get(self, name: str) -> Any:
        if name not in self._tensors:
            raise KaruiError(f"{self.path} stores no tensor {name!r}.")
        return self._tensors[name]

    def _heads(self, name: str) -> int:
        return _heads(name, self.config)


def _heads(name: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows llama.cpp orders differently; 0 for every other tensor."""
    if config["model_type"] not in ("llama", "mistral"):
        return 0
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return (config.get("num_key_value_heads") or config["num_attention_heads"]) if ".k_proj." in name else 0


# --- blocks ----------------------------------------------------------------------------------------------------------


def block_type(name: str, q: QTensor) -> str:
    """The block type that holds `q` exactly. Raises `UnsupportedError` naming the tensor when there is none."""
    spec, width = q.spec, q.shape[-1]
    group = spec.group_size or width
    if spec.format not in ("int", "ternary", "binary"):
        raise UnsupportedError(f"{name}: GGUF has no block that holds {spec} exactly; int and ternary grids go in.")
    if not torch.equal(q.scale.to(torch.float16).float(), q.scale.float()):
        raise UnsupportedError(
            f"{name}: its {spec.scale_dtype} scales are no fp16 numbers, and GGUF blocks hold fp16; use {spec._stem()}."
        )
    if spec.format == "ternary" and width % 256 == 0 and group % 256 == 0:
        return _TQ2_0
    if width % 32 or group % 32:
        raise UnsupportedError(f"{name}: GGUF blocks are 32 wide; groups of {group} in rows of {width} do not fit them.")
    if spec.format != "int" or (spec.symmetric and spec.bits <= 4):
        return _Q4_0
    if not spec.symmetric and spec.bits == 8:
        raise UnsupportedError(f"{name}: {spec}: code - zero needs 9 bits, GGUF's largest block has 8.")
    return _Q8_0


def to_blocks(q: QTensor, kind: str, heads: int = 0) -> np.ndarray:
    """The rows of `q` as GGUF blocks, uint8 [out, bytes]; `heads`: reorder rows as llama.cpp wants q and k."""
    rows, width = q.codes.shape[0], q.shape[-1]
    size = 256 if kind == _TQ2_0 else 32
    codes = q.codes.to(torch.int16)
    scale = q.scale.to(torch.float16).expand(rows, -1) if q.spec.granularity == "tensor" else q.scale.to(torch.float16)
    if q.zero is not None:
        zero = q.zero.expand(rows, -1) if q.zero.shape[0] == 1 else q.zero
        codes = codes - zero.to(torch.int16).repeat_interleave(width // zero.shape[1], dim=1)
    x: np.ndarray = codes.numpy()
    d: np.ndarray = scale.repeat_interleave(width // scale.shape[1] // size, dim=1).contiguous().numpy()
    if heads:
        x, d = _permute(x, heads), _permute(d, heads)
    blocks = x.reshape(rows, -1, size)
    d_bytes = np.ascontiguousarray(d).view(np.uint8).reshape(rows, -1, 2)
    if kind == _Q8_0:
        body: np.ndarray = blocks.astype(np.int8).view(np.uint8)
    elif kind == _Q4_0:
        nibbles = (blocks + 8).astype(np.uint8)
        body = nibbles[..., :16] | nibbles[..., 16:] << 4
    elif kind == _TQ2_0:
        # Two halves of 128 values; byte m of a half holds values m, m + 32, m + 64, m + 96, the first in the lowest bits.
        slots = (blocks + 1).astype(np.uint8).reshape(rows, -1, 2, 4, 32)
        body = slots[..., 0, :] | slots[..., 1, :] << 2 | slots[..., 2, :] << 4 | slots[..., 3, :] << 6
        body = body.reshape(rows, -1, 64)
    else:
        raise AssertionError(kind)
    ordered = [body, d_bytes] if kind == _TQ2_0 else [d_bytes, body]
    return np.ascontiguousarray(np.concatenate(ordered, axis=-1).reshape(rows, -1))


def _q4_0(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales fp16 [out, in / 32] and codes int8 [out, in]."""
    blocks = data.reshape(data.shape[0], -1, 18)
    nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return _halfs(blocks[..., :2]), (nibbles.astype(np.int8) - 8).reshape(data.shape[0], -1)


def _q8_0(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = data.reshape(data.shape[0], -1, 34)
    return _halfs(blocks[..., :2]), np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(data.shape[0], -1)


def _tq2_0(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = data.reshape(data.shape[0], -1, 66)
    body = blocks[..., :64].reshape(data.shape[0], -1, 2, 1, 32)
    slots = body >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1) & 3
    return _halfs(blocks[..., 64:]), (slots.astype(np.int8) - 1).reshape(data.shape[0], -1)


def _halfs(pairs: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0]


def _permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """transformers' half-split q/k rows -> llama.cpp's interleaved ones; [heads * head_dim, ...]."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


# --- the file --------------------------------------------------------------------------------------------------------


def _write(source: Opened, path: Path, architecture: str, name: str) -> dict[str, str]:
    import gguf

    config = source.config
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config, name)
    _add_tokenizer(writer, source)
    names = {hf: g for g, hf in gguf_model.GLOBAL_NAMES.items()}
    names |= {
        f"model.layers.{i}.{hf}.{part}": f"blk.{i}.{g}.{part}"
        for i in range(config["num_hidden_layers"])
        for g, hf in gguf_model.BLOCK_NAMES.items()
        for part in ("weight", "bias")
    }
    types = {}
    for hf, w in source.weights().items():
        if hf not in names:
            raise UnsupportedError(f"tensor {hf!r} has no place in a {architecture} GGUF.")
        heads = _heads(hf, config)
        if isinstance(w, QTensor):
            types[hf] = block_type(hf, w)
            writer.add_tensor(names[hf], to_blocks(w, types[hf], heads), raw_dtype=gguf.GGMLQuantizationType[types[hf]])
        else:
            types[hf] = _F32
            value = w.float().numpy()
            writer.add_tensor(names[hf], np.ascontiguousarray(_permute(value, heads) if heads else value))
    file_types = {_Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0, _Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0, _F32: gguf.LlamaFileType.ALL_F32}
    matrices = [t for hf, t in types.items() if ".layers." in hf and "norm" not in hf and hf.endswith(".weight")]
    most = max(set(matrices), key=matrices.count, default=_F32)
    writer.add_file_type(file_types.get(most, gguf.LlamaFileType.MOSTLY_TQ2_0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return types


def _add_config(writer: Any, config: Mapping[str, Any], name: str) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UnsupportedError(f"RoPE scaling {rope} is not written as GGUF.")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name(name)
    writer.add_quantization_version(2)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, source: Opened) -> None:
    import gguf

    folder = source.tokenizer_path
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise KaruiError(f"{folder}: {Path(error.filename).name} is missing; a GGUF file holds its tokenizer.") from error
    if content["model"]["type"] != "BPE":
        raise UnsupportedError(f"{folder}: a {content['model']['type']} tokenizer is not written as GGUF; byte-level BPE is.")
    ids = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content["added_tokens"]}}
    size = max(source.config["vocab_size"], max(ids.values()) + 1)
    tokens, types = [f"[PAD{i}]" for i in range(size)], [gguf.TokenType.UNUSED] * size
    for token, i in ids.items():
        tokens[i], types[i] = token, gguf.TokenType.NORMAL
    for token in content["added_tokens"]:
        types[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(content))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]])
    for role, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        token = settings.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            add(ids[token])
    writer.add_add_bos_token(bool(settings.get("add_bos_token", False)))
    template = source.manifest.chat_template if source.manifest else settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, str):
        writer.add_chat_template(template)


def pre_tokenizer(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json. Raises `UnsupportedError` when it is none that karui knows."""
    pre = content.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0].get("pattern", {}).get("Regex")
        for name, known in gguf_model.SPLIT.items():
            if pattern == known:
                return name
    raise UnsupportedError(f"the pre-tokenizer {kinds} is none llama.cpp is known to have; GGUF names it instead of holding it.")


def _check(source: Opened, path: Path) -> None:
    """Every value in the file, as the gguf package dequantizes it, equals the bundle's. Raises `CorruptError`."""
    import gguf
    from gguf.quants import dequantize

    seen = set()
    for tensor in gguf.GGUFReader(path).tensors:
        name = gguf_model.hf_name(tensor.name)
        seen.add(name)
        w = source.weight(name)
        wanted = (w.dequantize() if isinstance(w, QTensor) else w.float()).numpy()
        value = dequantize(tensor.data, tensor.tensor_type)
        if heads := _heads(name, source.config):
            value = gguf_model.unpermute(value, heads)
        if not np.array_equal(value.reshape(wanted.shape), wanted):
            raise CorruptError(f"{name}: the values in the GGUF file differ from the bundle's.")
    if seen != set(source.names):
        raise CorruptError(f"{path}: tensors {sorted(seen ^ set(source.names))[:3]} are missing or not the bundle's.")


def _cached_tokenizer(meta: Mapping[str, Any]) -> Path:
    keys = sorted(k for k in meta if k.startswith("tokenizer."))
    digest = hashlib.sha256(json.dumps([(k, meta[k]) for k in keys], default=str).encode()).hexdigest()[:16]
    target = cache_root() / "tokenizers" / digest
    if not target.is_dir():
        tokenizer, settings = gguf_model.build_tokenizer(dict(meta))
        with staging(target.parent) as folder:
            (folder / "tokenizer").mkdir()
            gguf_model.save_tokenizer(tokenizer, settings, folder / "tokenizer")
            publish(folder / "tokenizer", target, {"source": "GGUF metadata"})
    return target
