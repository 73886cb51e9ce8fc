"""`export_model`: a model folder, and perhaps an adapter, become a quantized bundle.

Tensor by tensor: merge the adapter in fp32, put linears of the blocks on their grid, embedding and head on theirs, keep the rest.
What happened to every tensor, and why, is in the report and in the manifest.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from karui.catalogue.helpers import load_config
from karui.catalogue.store import sha256_file
from karui.configs.errors import KaruiError, nearest
from karui.configs.manifest import Manifest
from karui.configs.quantspec import QuantSpec
from karui.inference.bundle import released
from karui.inference.bundle.layout import DTYPE_NAMES
from karui.inference.bundle.merge import Adapter, base_weight, load_adapter
from karui.inference.bundle.reader import Opened, is_bundle, read_model_folder, weight_files
from karui.inference.bundle.writer import Parity, write
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize

log = logging.getLogger(__name__)
Specs = str | QuantSpec | Mapping[str, str | QuantSpec]
_EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")
_BLOCK = re.compile(r".*\.layers\.\d+\..*\.weight")
_DECAY = re.compile(r".*\.linear_attn\.in_proj_(ba|a|b)\.weight")
_ROUTER = re.compile(r".*\.(gate|router|shared_expert_gate|weights_proj)\.weight")


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What became of one tensor. `error` is ||w - q|| / ||w||, 0 for one kept."""

    name: str
    fate: str
    why: str
    spec: str
    num_values: int
    error: float


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What `export_model` did. `fp32_bytes` counts every weight once at four bytes, tied ones too."""

    path: Path
    manifest: Manifest
    fates: tuple[Fate, ...]
    bundle_bytes: int
    fp32_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes of the whole bundle folder over those of the fp32 weights."""
        return self.bundle_bytes / self.fp32_bytes

    def summary(self) -> list[dict[str, Any]]:
        """One row per (fate, spec, why): tensors, values, mean relative error."""
        rows: dict[tuple[str, str, str], list[Fate]] = {}
        for fate in self.fates:
            rows.setdefault((fate.fate, fate.spec, fate.why), []).append(fate)
        return [
            {"fate": f, "spec": s, "why": w, "tensors": len(group), "values": sum(x.num_values for x in group),
             "error": sum(x.error for x in group) / len(group)}
            for (f, s, w), group in rows.items()
        ]  # fmt: skip


def export_model(
    source: str | Path,
    spec: Specs,
    output: str | Path,
    *,
    adapter: str | Path | None = None,
    base_spec: str | QuantSpec | None = None,
    embedding_spec: str | QuantSpec = "w8",
    quantized: Mapping[str, QTensor | torch.Tensor] | None = None,
    recipe: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    parity: Parity | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> ExportReport:
    """Merge, quantize and write.

    Args:
        source: an unquantized Hugging Face folder, or one whose experts are in MXFP4 (gpt-oss): their codes stay as they are.
        spec: the grid of every block linear, or {pattern: grid}. A pattern is a shell pattern over module names
            (`*.mlp.down_proj`, `model.layers.0.*`); the first that matches counts; a linear that none matches is kept.
        adapter: a peft LoRA or DoRA folder to merge first.
        base_spec: the grid the base's linears had while the adapter was trained (QLoRA): they are put on it before the
            merge, so that what is exported is the model that was trained. By default what the adapter's `karui_adapter.json`
            says; a peft adapter without one had an unquantized base.
        embedding_spec: the grid of embedding and output head, the largest matrices of a small model; `none` keeps them. By
            default int8 with a scale per row, that is per token of the vocabulary.
        quantized: weights that are on a grid already, by name: their codes and scales are written as they are, whatever `spec`
            says, so that what was trained or calibrated is what runs. A plain tensor is a weight that calibration changed (a
            norm that took up a factor): it is written in fp32.
        parity: see `karui.inference.bundle.writer.Parity`.
        progress: called with (tensors done, of how many, name).

    Raises:
        KaruiError: quantized already, a group size that does not divide a tensor (named, with sizes that do), NaN weights
            (named), a pattern or adapter that matches nothing, a target that exists, a full disk, parity not met.
    """
    source = Path(source)
    if is_bundle(source):
        raise KaruiError(f"{source} is a bundle, so it is quantized already; export from the model folder it was made of.")
    model = open_source(source)
    lora = load_adapter(adapter) if adapter is not None else None
    grids = _Grids(spec, embedding_spec, model)
    if lora is not None:
        _check_adapter(lora, model)
    base = _base_grid(base_spec, lora)
    ready = dict(quantized or {})
    if unknown := sorted(set(ready) - set(model.names)):
        raise KaruiError(f"{len(unknown)} quantized weights are not the model's, first {unknown[0]!r}.")

    weights: dict[str, QTensor | torch.Tensor] = {}
    fates, dtypes, fp32_bytes = [], {}, 0
    for done, name in enumerate(model.names):
        w = model.weight(name)
        if isinstance(w, QTensor):
            if lora is not None and lora.changes(name):
                raise KaruiError(f"{name} is in {w.spec} already, and the adapter would change it; adapt other layers.")
            ready.setdefault(name, w)
            w = w.dequantize()
        dtypes[name] = DTYPE_NAMES[w.dtype]
        fp32_bytes += 4 * w.numel()
        if base is not None and _is_linear(name, w):
            w = base_weight(name, w, base, lora)
        if lora is not None:
            w = lora.apply(name, w)
        given = ready.get(name)
        if isinstance(given, QTensor):
            weights[name] = given
            fates.append(Fate(name=name, fate="quantized", why="on its grid before the export", spec=str(given.spec),
                              num_values=w.numel(), error=_error(w, given)))
            continue
        if given is not None:
            weights[name] = given.float()
            fates.append(Fate(name=name, fate="kept", why="changed by calibration", spec="none", num_values=w.numel(), error=0.0))
            continue
        grid, why = grids.of(name, w)
        if grid.format == "none":
            # Norms and biases are a fraction of a percent of the bytes and the runtime computes with them in fp32.
            weights[name] = w.float() if w.dim() < 2 else w
            fates.append(Fate(name=name, fate="kept", why=why, spec="none", num_values=w.numel(), error=0.0))
        else:
            q = weights[name] = quantize(w, grid, name=name)
            fates.append(Fate(name=name, fate="quantized", why=why, spec=str(grid), num_values=w.numel(), error=_error(w, q)))
        if progress is not None:
            progress(done + 1, len(model.names), name)

    for (fate, grid_name, why), count in Counter((f.fate, f.spec, f.why) for f in fates).items():
        log.info("%d tensors %s%s: %s", count, fate, "" if fate == "kept" else f" to {grid_name}", why)
    manifest = write(
        output,
        weights,
        model.config,
        tokenizer_dir=source,
        recipe=recipe,
        provenance={
            "source_model": source.name,
            "base_sha256": base_sha256(source),
            "adapter": Path(adapter).name if adapter is not None else "",
            **(provenance or {}),
        },
        fates={f.name: (f.fate, f.why) for f in fates},
        source_dtypes=dtypes,
        tied=model.tied,
        parity=parity,
        overwrite=overwrite,
    )
    size = sum(p.stat().st_size for p in Path(output).rglob("*") if p.is_file())
    return ExportReport(path=Path(output), manifest=manifest, fates=tuple(fates), bundle_bytes=size, fp32_bytes=fp32_bytes)


def open_source(folder: Path) -> Opened:
    """What a bundle can be made of: a folder in high precision, or with experts in MXFP4. Errors as in `read_model_folder`."""
    quantization = load_config(folder).get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        return released.read(folder)
    return read_model_folder(folder)


def _error(w: torch.Tensor, q: QTensor) -> float:
    return float((w.float() - q.dequantize()).norm() / w.float().norm().clamp(min=1e-30))


class _Grids:
    """Which grid each tensor gets, and why."""

    def __init__(self, spec: Specs, embedding: str | QuantSpec, model: Opened) -> None:
        patterns = spec if isinstance(spec, Mapping) else {"*": spec}
        self._patterns = {pattern: QuantSpec.parse(str(s)) for pattern, s in patterns.items()}
        self._embedding = QuantSpec.parse(str(embedding))
        self._tied = {group[0]: group[1:] for group in model.tied}
        self._single = not isinstance(spec, Mapping)
        modules = [n.removesuffix(".weight") for n in model.names if _BLOCK.fullmatch(n)]
        for pattern in self._patterns:
            if not any(fnmatchcase(module, pattern) for module in modules):
                parts = {m.rsplit(".", 1)[-1] for m in modules}
                raise KaruiError(
                    f"export pattern {pattern!r} matches no linear layer of the model; layers end in {', '.join(sorted(parts))}."
                    f"{nearest(pattern.strip('*.'), parts)}"
                )

    def of(self, name: str, w: torch.Tensor) -> tuple[QuantSpec, str]:
        none = QuantSpec.parse("none")
        if name in _EMBEDDINGS:
            role = "embedding" if name == _EMBEDDINGS[0] else "output head"
            if name in self._tied:
                role += f", tied with {', '.join(self._tied[name])}"
            return self._embedding, role
        if w.dim() < 2:
            return none, "norm or bias"
        if not _is_linear(name, w):
            return none, "not a linear of a block"
        if _ROUTER.fullmatch(name):
            return none, "router: small, and its choices are sensitive to rounding"
        if _DECAY.fullmatch(name):
            return none, "decay and strength of a recurrent state: small, and errors in them add up over a text"
        module = name.removesuffix(".weight")
        for pattern, spec in self._patterns.items():
            if fnmatchcase(module, pattern):
                reason = "linear of a block" if self._single else f"matches {pattern!r}"
                return spec, reason if spec.format != "none" else f"{reason}, to be kept"
        return none, "no pattern matches it"


def _is_linear(name: str, w: torch.Tensor) -> bool:
    return w.dim() == 2 and _BLOCK.fullmatch(name) is not None


def _base_grid(given: str | QuantSpec | None, adapter: Adapter | None) -> QuantSpec | None:
    if given is None and adapter is not None:
        given = adapter.base_spec
        if given is not None:
            log.info("the adapter was trained on a base of %s: the weights are put on that grid before the merge", given)
    if given is None:
        return None
    spec = QuantSpec.parse(str(given))
    return spec if spec.format != "none" else None


def _check_adapter(adapter: Adapter, model: Opened) -> None:
    adapter.drop_tied(model.tied)
    if unknown := sorted(adapter.names() - set(model.names)):
        raise KaruiError(
            f"{adapter.folder} changes {len(unknown)} weights the model does not have: {', '.join(unknown[:3])}; "
            "it was trained on another model."
        )


def base_sha256(folder: Path) -> str:
    """`Provenance.base_sha256` of a model folder: sha256 of its weight file; of several: over their digests in name order."""
    digests = [sha256_file(path) for path in weight_files(folder)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
