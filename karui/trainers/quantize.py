"""Quantize a model without training it: a post-training method over calibration text, then a bundle past the parity gate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError
from karui.configs.manifest import Manifest
from karui.configs.quantspec import QuantSpec


def quantize_to_bundle(
    model: str,
    output: Path,
    *,
    method: str,
    spec: str,
    embedding: str = "w8",
    calibration: Path | None = None,
    samples: int = 64,
    length: int = 512,
    work: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    budget: str | None = None,
    grids: Sequence[str] = ("w2g64", "w3g64", "w4g64"),
    device: str = "auto",
) -> Manifest:
    """Run one method of `karui.qat.methods` and write its result; a method that trains does so on the calibration text.

    Args:
        model: a model folder or a catalogue name.
        calibration: text file; the first `samples` x `length` tokens are used. Only methods that need no data go without.
        work: folder for finished blocks, and what was measured for a budget, from which a killed run goes on.
        settings: the method's own; skip: patterns of linears that stay in high precision.
        budget: bits per weight or bytes: each linear gets the one of `grids` that serves the loss best, in place of `spec`.
        device: where blocks are calibrated, and a model is measured for a budget: cpu, cuda, or auto, a GPU where there is one.

    Raises:
        KaruiError: what the method refuses, too little calibration text, a taken target, parity not met.
        UnsupportedError: a grid the method does not serve, a model the engine does not run, or one that is quantized already.
    """
    from rich.console import Console
    from rich.progress import Progress

    from karui.catalogue import resolve
    from karui.inference.bundle.staging import check_target
    from karui.inference.bundle.writer import write
    from karui.inference.evaluate.memory import disk_bytes
    from karui.inference.models.config import from_hf
    from karui.kernels.qtensor import QTensor
    from karui.kernels.quantize import quantize
    from karui.qat.methods import TRAINED
    from karui.qat.methods import method as find_method
    from karui.qat.run import quantize_model, read_config
    from karui.qat.types import Options
    from karui.trainers.mixed import plan_for
    from karui.trainers.parity import bound_for, make_gate, quantized_model

    if method in TRAINED:
        from karui.trainers.quantize_trained import train_to_bundle

        if calibration is None or budget is not None:
            raise KaruiError(f"{method} trains on the grid --spec: give --calibration FILE, and no --budget.")
        check_target(Path(output), overwrite=False)
        return train_to_bundle(model, output, method=method, spec=spec, embedding=embedding, calibration=calibration,
                               samples=samples, length=length, work=work, settings=settings, skip=skip)  # fmt: skip
    chosen = find_method(method)
    for grid in (spec,) if budget is None else grids:
        chosen.check(QuantSpec.parse(grid))
    check_target(Path(output), overwrite=False)
    console = Console(highlight=False)
    where = found_device(device)
    if device == "auto" and where != "cpu":
        console.print(f"calibrating on {where}; --device cpu does it here")
    folder = resolve(model)
    from_hf(read_config(folder))  # a model the engine cannot run is refused before the work, not after it
    if chosen.calibrates and calibration is None:
        raise KaruiError(f"{method} needs calibration text: give --calibration FILE, or a method that needs none (rtn, hqq).")
    rows = rows_of_text(folder, calibration, samples, length) if calibration is not None and chosen.calibrates else None
    plan = None
    if budget is not None:
        if calibration is None:
            raise KaruiError("--budget measures each layer's loss increase: give --calibration FILE.")
        plan_rows = rows_of_text(folder, calibration, samples, length) if rows is None else rows
        with Progress(console=console) as bar:
            task = bar.add_task("sensitivity")
            plan = plan_for(folder, plan_rows, grids, budget, skip=skip, work=work, device=where,
                            progress=lambda done, total: bar.update(task, completed=done, total=total))  # fmt: skip
        console.print(plan.table())
        spec = str(max(set(plan.specs.values()), key=list(plan.specs.values()).count))
    overrides = {n.removesuffix(".weight"): s for n, s in plan.specs.items()} if plan is not None else {}
    with Progress(console=console) as bar:
        task = bar.add_task(f"{method} {spec if plan is None else 'mixed'}")
        options = Options(
            settings=settings or {}, skip=skip, overrides=overrides, device=where,
            work=work if plan is None or work is None else Path(work) / "blocks",
            progress=lambda done, total, seconds: bar.update(task, completed=done, total=total),
        )  # fmt: skip
        result = quantize_model(folder, method, spec, rows, options)
    notes = {**result.facts, **({"mixed_precision": plan.dump()} if plan is not None else {})}
    if static := {r.name: r.activation_scale for r in result.report if r.activation_scale is not None}:
        notes["activation_scales"] = static
    head = QuantSpec.parse(embedding)
    weights: dict[str, Any] = dict(result.weights)
    fates = {r.name: ("fell_back", r.fallback) if r.fallback else ("quantized" if r.spec != "none" else "kept", r.note)
             for r in result.report if r.name in weights}  # fmt: skip
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights and head.format != "none":
            weights[name] = quantize(weights[name], head, name=name)
            fates[name] = ("quantized", "embedding" if "embed" in name else "output head")
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if "lm_head.weight" not in weights else ()
    dense = {k: v.dequantize() if isinstance(v, QTensor) else v for k, v in weights.items()}
    grids_of = {k: v.spec for k, v in weights.items() if isinstance(v, QTensor)}
    eights = [k for k, s in grids_of.items() if s.activation_bits == 8]
    manifest = write(
        output,
        weights,
        result.config,
        tokenizer_dir=folder,
        provenance={"source_model": folder.name, "notes": {"quantization": json.loads(json.dumps(notes, default=str))}},
        fates=fates,
        tied=tied,
        parity=make_gate(folder, lambda _: quantized_model(result.config, dense, eights), bound_for(grids_of.values())),
    )
    for entry in result.report:
        if entry.fallback:
            console.print(f"  {entry.name}: {entry.fallback}")
    console.print(f"{output}: {disk_bytes(output) / 1e6:.1f} MB, parity {json.dumps(manifest.parity)}")
    return manifest


def found_device(name: str) -> str:
    """`auto` resolved; raises `KaruiError` for a device that is none or is not here."""
    import torch

    from karui.kernels.triton_support.driver import no_gpu

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise KaruiError(f"device {name!r} is not known; use auto, cpu or cuda.")
    if name != "cpu" and not torch.cuda.is_available():
        raise KaruiError(f"device {name}: torch finds no GPU here: {no_gpu()}")
    return name


def rows_of_text(folder: Path, text: Path, samples: int, length: int) -> Any:
    """The first samples x length tokens of a text file, int64 [samples, length]."""
    import torch

    from karui.catalogue import load_tokenizer
    from karui.inference.evaluate.scoring import read_text

    ids = load_tokenizer(folder)(read_text(text), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < samples * length:
        raise KaruiError(f"{text} holds {len(ids)} tokens; {samples} samples of {length} need {samples * length}. Ask for fewer.")
    return torch.tensor(ids[: samples * length]).view(samples, length)
