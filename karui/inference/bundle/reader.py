"""`open_model(path)`: a bundle or a plain model folder, mapped from disk; packed weights stay packed until asked for."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from karui.configs.errors import CorruptError, KaruiError, UnsupportedError
from karui.configs.manifest import MANIFEST_NAME, FileRecord, Manifest
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle.layout import check_finite, check_parts, from_parts
from karui.inference.bundle.writer import sha256_tensor
from karui.inference.models.weights import transformers_name
from karui.kernels.qtensor import QTensor

logger = logging.getLogger(__name__)

Verify = Literal["full", "quick"]
Weight = QTensor | torch.Tensor


_TOWER = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_TEXT_PART = re.compile(r"^(model\.)?language_model\.")
# What files of Gemma 3 leave out of their text_config.
_GEMMA3_TEXT = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "sliding_window": 4096,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
}  # fmt: skip


def is_bundle(path: str | Path) -> bool:
    """Whether the folder holds karui's own format (`manifest.json` of kind karui-bundle); its contents are not checked."""
    try:
        content = json.loads((Path(path) / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("kind") == "karui-bundle"


class Weights(Mapping[str, Weight]):
    """name -> QTensor or Tensor, read and checked when asked for, not kept. A tied name is not a key; see `Opened.tied`."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def __getitem__(self, name: str) -> Weight:
        if name not in self:
            raise KeyError(name)
        return self._opened.weight(name)

    def __contains__(self, name: object) -> bool:
        return name in self._opened.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened.names)

    def __len__(self) -> int:
        return len(self._opened.names)


class Opened(ABC):
    """What the engine loads, whatever the format on disk.

    Attributes:
        path: the folder (or file) that was opened.
        config: the Hugging Face config of the model, as a dict.
        tokenizer_path: the folder that holds the tokenizer's files.
        names: logical names of the stored tensors.
        tied: groups of names that share a tensor; the first of each is the stored one.
        manifest: of a bundle, else None.
    """

    path: Path
    config: dict[str, Any]
    tokenizer_path: Path
    names: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    manifest: Manifest | None = None

    @abstractmethod
    def spec(self, name: str) -> QuantSpec:
        """The grid of a tensor; `none` for one in high precision."""

    @abstractmethod
    def weight(self, name: str) -> Weight:
        """One tensor, its codes unpacked. Raises `CorruptError` naming it when its form or its scales are wrong."""

    @abstractmethod
    def packed(self, name: str) -> dict[str, torch.Tensor]:
        """The stored parts of one tensor, mapped from disk: codes (packed), scale, ...; {"": tensor} in high precision."""

    def weights(self) -> Weights:
        """All tensors as a lazy mapping; `dict(opened.weights())` reads them all."""
        return Weights(self)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes on disk of everything that belongs to the model."""


class SafetensorsFiles:
    """Several safetensors files as one mapping of mapped tensors."""

    def __init__(self, paths: list[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                handle = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CorruptError(f"{path} is missing.") from error
            except (SafetensorError, OSError) as error:
                raise CorruptError(f"{path}: truncated or not a safetensors file ({error}); fetch or export it again.") from error
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                if name in self._files:
                    raise CorruptError(f"{path}: tensor {name} is in another file too.")
                self._files[name] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def part(self, name: str, index: int) -> torch.Tensor:
        """One of the tensor's first dimension."""
        return self._files[name].get_slice(name)[index]


class Bundle(Opened):
    """karui's own format; see `karui.configs.manifest.FORMAT`. Made by `read`."""

    manifest: Manifest

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = self.tokenizer_path = path
        self.manifest = manifest
        self.config = dict(manifest.model)
        self.names = tuple(manifest.tensors)
        self.tied = manifest.tied
        self._files = SafetensorsFiles([path / name for name in manifest.weight_files])
        wanted = {s for name, record in manifest.tensors.items() for s in record.stored_names(name).values()}
        there = set(self._files.names())
        if missing := sorted(wanted - there):
            raise CorruptError(f"{path}: {len(missing)} tensors of the manifest are in no weight file: {', '.join(missing[:5])}.")
        if unconsumed := sorted(there - wanted):
            raise CorruptError(
                f"{path}: {len(unconsumed)} stored tensors are unknown to the manifest: {', '.join(unconsumed[:5])}."
            )

    def spec(self, name: str) -> QuantSpec:
        return QuantSpec.parse(self._record(name).spec)

    def packed(self, name: str) -> dict[str, torch.Tensor]:
        record = self._record(name)
        parts = {part: self._files.read(stored) for part, stored in record.stored_names(name).items()}
        if record.spec == "none":
            if tuple(parts[""].shape) != record.shape:
                raise CorruptError(f"{name}: stored as {list(parts[''].shape)}, its manifest says {list(record.shape)}.")
            check_finite(name, parts[""])
        else:
            check_parts(name, parts, QuantSpec.parse(record.spec), record.shape)
        for part, stored in record.stored_names(name).items():
            self._check_hash(stored, parts[part], record.parts[part])
        return parts

    def weight(self, name: str) -> Weight:
        record, parts = self._record(name), self.packed(name)
        return parts[""] if record.spec == "none" else from_parts(parts, QuantSpec.parse(record.spec), record.shape)

    def nbytes(self) -> int:
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())

    def verify_hashes(self) -> None:
        """Hash every stored part against the manifest. Raises `CorruptError` naming the first that differs."""
        for name, record in self.manifest.tensors.items():
            for part, stored in record.stored_names(name).items():
                self._check_hash(stored, self._files.read(stored), record.parts[part])

    def _check_hash(self, stored: str, value: torch.Tensor, wanted: str) -> None:
        if sha256_tensor(value) != wanted:
            raise CorruptError(f"{self.path}: {stored} has not the sha256 its manifest names; the file was damaged or changed.")

    def _record(self, name: str) -> Any:
        if name not in self.manifest.tensors:
            raise KaruiError(f"{self.path} stores no tensor {name!r}.")
        return self.manifest.tensors[name]


def read(path: str | Path, *, verify: Verify = "quick") -> Bundle:
    """Open a bundle.

    Args:
        verify: quick checks that every file is there, of its size, with the hashes of the small ones, and that tensors and
            manifest agree in names; full also hashes every tensor (about a second per gigabyte). Either way a tensor's hash
            and its scales are checked when it is read, so that no engine runs a weight that is not the manifest's.

    Raises:
        KaruiError: no bundle, or of a newer schema.
        CorruptError: a wrong hash, a missing, unknown or truncated tensor, a file outside the folder; names it.
    """
    folder = Path(path)
    manifest = Manifest.read(folder)
    for name, record in manifest.files.items():
        _check_file(folder, name, record, hashed=True)
    for name, record in manifest.weight_files.items():
        _check_file(folder, name, record, hashed=False)
    bundle = Bundle(folder, manifest)
    if verify == "full":
        bundle.verify_hashes()
    return bundle


def _check_file(folder: Path, name: str, record: FileRecord, *, hashed: bool) -> None:
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links in a circle
        inside = False
    if not inside:
        raise CorruptError(f"{folder}: {name} leads out of the bundle; a bundle holds its own files.")
    if not path.is_file():
        raise CorruptError(f"{folder}: {name} is missing.")
    if path.stat().st_size != record.bytes:
        raise CorruptError(
            f"{path}: {path.stat().st_size:,} bytes, its manifest says {record.bytes:,}; the file is truncated or changed."
        )
    if hashed and hashlib.sha256(path.read_bytes()).hexdigest() != record.sha256:
        raise CorruptError(f"{path} has not the sha256 its manifest names; the file was damaged or changed.")


class ModelFolder(Opened):
    """A plain Hugging Face folder: config.json, safetensors, tokenizer. Made by `read_model_folder`.

    Of a Gemma 3 with a vision tower it is the text model: config and names are those of `gemma3_text`, the tower is not there.
    Experts of gpt-oss, stored as one tensor [experts, in, out] with gate and up in turn, have names of their own, biases too.
    """

    def __init__(self, path: Path, config: dict[str, Any], files: SafetensorsFiles) -> None:
        self.path = self.tokenizer_path = path
        self.config = config
        self._files = files
        self._stored = {transformers_name(name): name for name in files.names()}
        if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), dict):
            text = config["text_config"]
            own = {"eos_token_id": config.get("eos_token_id", text.get("eos_token_id")), "model_type": "gemma3_text"}
            config = self.config = {**_GEMMA3_TEXT, **text, **own}
            found = {_TEXT_PART.sub("", name): stored for name, stored in self._stored.items() if not _TOWER.match(name)}
            logger.info("%s: the text model alone; %d tensors of the vision tower are passed over", path,
                        len(self._stored) - len(found))
            self._stored = {n if n.startswith(("model.", "lm_head.")) else f"model.{n}": old for n, old in found.items()}
        names = list(self._stored)
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        if config.get("tie_word_embeddings") and embedding in names:
            if head in names and not torch.equal(files.read(head), files.read(embedding)):
                raise CorruptError(f"{path}: {head} differs from {embedding}, but config.json ties them (tie_word_embeddings).")
            names = [name for name in names if name != head]
            self.tied = ((embedding, head),)
        self._experts: dict[str, tuple[str, int, slice]] = {}
        self.names = ()
        for name in names:
            if self._holds_experts(name):
                experts = experts_of(name, files.shape(self._stored[name])[0])
                self._experts |= {one: (self._stored[name], *at) for one, at in experts.items()}
                self.names += tuple(experts)
            else:
                self.names += (name,)

    def _holds_experts(self, name: str) -> bool:
        """Whether a stored tensor is all experts of a layer, as gpt-oss has them."""
        parent, _, last = name.rpartition(".")
        return last.removesuffix("_bias") in ("gate_up_proj", "down_proj") and f"{parent}.gate_up_proj_bias" in self._stored

    def spec(self, name: str) -> QuantSpec:
        return QuantSpec.parse("none")

    def packed(self, name: str) -> dict[str, torch.Tensor]:
        if name in self._experts:
            stored, expert, rows = self._experts[name]
            tensor = self._files.part(stored, expert)
            tensor = (tensor.T if tensor.ndim == 2 else tensor)[rows].contiguous()
        elif name not in self._stored or name not in self.names:
            raise KaruiError(f"{self.path} stores no tensor {name!r}.")
        else:
            tensor = self._files.read(self._stored[name])
        check_finite(name, tensor)
        return {"": tensor}

    def weight(self, name: str) -> torch.Tensor:
        return self.packed(name)[""]

    def nbytes(self) -> int:
        return sum(p.stat().st_size for p in self.path.iterdir() if p.is_file())


def experts_of(name: str, experts: int) -> dict[str, tuple[int, slice]]:
    """{name of its own: (expert, its rows)} of a fused tensor, named `{parent}.gate_up_proj` or `down_proj`, with or without
    `_bias`. Rows of gate and up take turns."""
    parent, _, last = name.rpartition(".")
    stem = last.removesuffix("_bias")
    kind = "weight" if stem == last else "bias"
    parts = {"down_proj": slice(None)} if stem == "down_proj" else {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    return {f"{parent}.{e}.{part}.{kind}": (e, rows) for e in range(experts) for part, rows in parts.items()}


def read_model_folder(path: str | Path) -> ModelFolder:
    """Open an unquantized Hugging Face folder.

    Raises:
        KaruiError: no config.json or no safetensors (pickled weights are not read).
        UnsupportedError: the config names a quantization, which this reader would misread.
        CorruptError: a shard is missing or truncated.
    """
    from karui.catalogue.helpers import load_config

    folder = Path(path)
    config = load_config(folder)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedError(f"{folder} is quantized already ({method}); give the unquantized model.")
    return ModelFolder(folder, config, SafetensorsFiles(weight_files(folder)))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: those its index names, else model.safetensors. None: `KaruiError`."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if (folder / "model.safetensors").is_file():
            return [folder / "model.safetensors"]
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = " Its weights are pickled, which karui does not read; convert them to safetensors." if pickled else ""
        raise KaruiError(f"{folder}: no model.safetensors.{hint}")
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{index}: not a safetensors index ({error}).") from error
    if any(not isinstance(name, str) or "/" in name or "\\" in name for name in files):
        raise CorruptError(f"{index}: names a file outside the folder.")
    return [folder / name for name in files]


def open_model(path: str | Path, *, verify: Verify = "quick") -> Opened:
    """A bundle, a plain model folder or a foreign format, in the same shape. `verify` and errors as in `read`."""
    folder = Path(path)
    if is_bundle(folder):
        return read(folder, verify=verify)
    if (folder / MANIFEST_NAME).is_file():
        Manifest.read(folder)  # says what is wrong with it
    if folder.is_file() and folder.suffix == ".gguf":
        from karui.inference.bundle import gguf

        return gguf.read(folder)
    method = _quant_method(folder)
    if method == "compressed-tensors":
        from karui.inference.bundle import compressed_tensors

        return compressed_tensors.read(folder)
    if method == "bitnet":
        from karui.inference.bundle import hf_bitnet

        return hf_bitnet.read(folder)
    if method in ("mxfp4", "fp8"):
        from karui.inference.bundle import released

        return released.read(folder)
    return read_model_folder(folder)


def _quant_method(folder: Path) -> str | None:
    from karui.catalogue.helpers import load_config

    quantization = load_config(folder).get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, dict) else None
