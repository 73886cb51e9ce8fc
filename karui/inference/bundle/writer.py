"""`write`: a bundle under a temporary name, read back by the independent decoder, past the parity gate, then renamed.

A bundle that fails anywhere on this way does not exist: nothing is left behind.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from karui import __version__
from karui.configs.errors import KaruiError
from karui.configs.manifest import MANIFEST_NAME, FileRecord, Manifest, Provenance, TensorRecord
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle import decode
from karui.inference.bundle.layout import DTYPE_NAMES, check_finite, check_parts, to_parts
from karui.inference.bundle.staging import check_target, copy_file, fsync, save_text, staged
from karui.kernels.qtensor import QTensor

log = logging.getLogger(__name__)

Parity = Callable[[Path], dict[str, Any]]
"""`parity(bundle_path) -> figures`, given by the caller, who has the prepared model.

It loads the finished but not yet published bundle with the engine, compares its logits with the prepared model's, and returns
JSON-able figures such as {"max_abs_dlogit": 3e-6, "bound": 1e-4, "tokens": 128}, which are stored in `manifest.parity`. When the
bound is not met it raises `KaruiError` (or returns {"passed": False, ...}); then the bundle is not written.
"""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_DEFAULT_SHARD_BYTES = 4 * 10**9


def write(
    target: str | Path,
    weights: Mapping[str, QTensor | torch.Tensor],
    model_config: Mapping[str, Any],
    *,
    tokenizer_dir: str | Path | None = None,
    recipe: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    fates: Mapping[str, tuple[str, str]] | None = None,
    source_dtypes: Mapping[str, str] | None = None,
    tied: Iterable[tuple[str, ...]] = (),
    adapters: Mapping[str, Any] | None = None,
    heads: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    parity: Parity | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
) -> Manifest:
    """Write a bundle folder.

    Args:
        target: the folder to make; must not exist, or be empty, unless `overwrite` (which replaces a bundle, nothing else).
        weights: name -> QTensor (stored packed) or Tensor (stored as it is). Tied names only once, see `tied`.
        model_config: the Hugging Face config.json of the model.
        tokenizer_dir: where tokenizer files and generation_config.json are copied from.
        fates: name -> (quantized | kept | fell_back, why).
        source_dtypes: name -> dtype of the weights before quantization; default float32.
        tied: groups of names sharing a tensor; the first of each is in `weights`, the others are not.
        provenance: fields of `Provenance` beyond karui, torch and created, which are filled in here.
        parity: see `Parity`.
        max_shard_bytes: above it the weights are split into `model-00001-of-0000N.safetensors`.

    Returns: the manifest as written.
    Raises:
        KaruiError: target taken, disk full (with the bytes needed and free), NaN scales (naming the tensor), parity not met.
        CorruptError: the disk gave back something other than what was written.
    """
    target = Path(target)
    check_target(target, overwrite=overwrite)  # before any work
    specs = {name: w.spec for name, w in weights.items() if isinstance(w, QTensor)}
    for name, spec in specs.items():
        assert QuantSpec.parse(str(spec)) == spec, f"{name}: the spelling of {spec!r} does not parse back"
    parts = {name: _stored(name, w) for name, w in weights.items()}
    needed = sum(t.nbytes for p in parts.values() for t in p.values()) + 16_000_000
    with staged(target, needed, overwrite=overwrite) as folder:
        shards = _shards(parts, max_shard_bytes)
        for file, names in shards.items():
            _save_safetensors(folder / file, names, parts)
        records = {}
        for name, w in weights.items():
            fate, why = (fates or {}).get(name, ("quantized", "") if name in specs else ("kept", ""))
            dtype = (source_dtypes or {}).get(name, "float32") if isinstance(w, QTensor) else DTYPE_NAMES[w.dtype]
            records[name] = TensorRecord(
                spec=str(specs[name]) if name in specs else "none",
                shape=tuple(w.shape),
                dtype=dtype,
                parts={part: sha256_tensor(t) for part, t in parts[name].items()},
                fate=fate,
                why=why,
            )
        files, chat_template = _small_files(folder, dict(model_config), tokenizer_dir, quantized=bool(specs))
        manifest = Manifest(
            model=dict(model_config),
            recipe=None if recipe is None else dict(recipe),
            tensors=records,
            tied=tuple(tuple(group) for group in tied),
            weight_files={file: FileRecord(bytes=(folder / file).stat().st_size) for file in shards},
            files=files,
            chat_template=chat_template,
            provenance=_provenance(provenance),
            adapters=dict(adapters or {}),
            heads=dict(heads or {}),
            plan=dict(plan or {}),
        )
        save_text(folder / MANIFEST_NAME, manifest.dumps())
        checked = decode.compare(folder, Manifest.read(folder), weights)
        log.info("read back %s tensors, %s codes: bit-equal", checked["tensors"], f"{checked['codes']:,}")
        if parity is not None:
            figures = parity(folder)
            if figures.get("passed") is False:
                raise KaruiError(f"the bundle does not reproduce the prepared model and was not written: {figures}.")
            manifest = manifest.model_copy(update={"parity": figures})
            save_text(folder / MANIFEST_NAME, manifest.dumps())
    return manifest


def save_hf_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], tokenizer_dir: Path) -> None:
    """Fill a staged folder as Hugging Face lays a model out: model.safetensors, config.json, the tokenizer's files."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fsync(folder / "model.safetensors")
    save_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    for file in TOKENIZER_FILES:
        if (tokenizer_dir / file).is_file():
            copy_file(tokenizer_dir / file, folder / file)


def sha256_tensor(tensor: torch.Tensor) -> str:
    """sha256 of the tensor's bytes as safetensors stores them: contiguous, little endian."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _stored(name: str, w: QTensor | torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(w, QTensor):
        parts = to_parts(w)
        check_parts(name, parts, w.spec, tuple(w.shape))
        return parts
    check_finite(name, w)
    if w.dtype not in DTYPE_NAMES:
        raise KaruiError(f"{name}: dtype {w.dtype} cannot be stored in a bundle.")
    return {"": w.detach().cpu().contiguous()}


def _shards(parts: Mapping[str, dict[str, torch.Tensor]], limit: int) -> dict[str, list[str]]:
    """file -> logical names, in order; a tensor's parts stay together."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensors in parts.items():
        nbytes = sum(t.nbytes for t in tensors.values())
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _save_safetensors(path: Path, names: list[str], parts: Mapping[str, dict[str, torch.Tensor]]) -> None:
    from safetensors.torch import save_file

    tensors = {f"{name}.{part}" if part else name: t for name in names for part, t in parts[name].items()}
    save_file(tensors, path, metadata={"format": "karui"})
    fsync(path)


def _small_files(
    folder: Path, config: dict[str, Any], tokenizer_dir: str | Path | None, *, quantized: bool
) -> tuple[dict[str, FileRecord], str | None]:
    """config.json and the tokenizer's files, with their hashes; and the chat template."""
    if quantized:
        # For whoever opens the folder with transformers: it then says that it does not know this quantization.
        config = {**config, "quantization_config": {"quant_method": "karui"}}
    save_text(folder / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    template = None
    if tokenizer_dir is not None:
        for name in TOKENIZER_FILES:
            source = Path(tokenizer_dir) / name
            if source.is_file():
                copy_file(source, folder / name)
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif (folder / "tokenizer_config.json").is_file():
            template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    records = {}
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors":
            with path.open("rb") as file:
                records[path.name] = FileRecord(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
    return records, template if isinstance(template, str) else None


def _provenance(given: Mapping[str, Any] | None) -> Provenance:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Provenance(**{"karui": __version__, "torch": torch.__version__, "created": now, **(given or {})})
