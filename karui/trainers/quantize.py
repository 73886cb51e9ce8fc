"""Quantize a model without training it: a post-training method over calibration text, then a bundle past the parity gate."""

from __future__ import annotations

import json
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
) -> Manifest:
    """Run one method of `karui.qat.methods` and write its result.

    Args:
        model: a model folder or a catalogue name.
        calibration: text file; the first `samples` x `length` tokens are used. Only methods that need no data go without.
        work: folder for finished blocks, from which a killed run goes on.

    Raises:
        KaruiError: what the method refuses, too little calibration text, a taken target, parity not met.
    """
    from rich.console import Console
    from rich.progress import Progress

    from karui.catalogue import resolve
    from karui.inference.bundle.writer import write
    from karui.inference.evaluate.memory import disk_bytes
    from karui.inference.models.config import from_hf
    from karui.kernels.quantize import quantize
    from karui.qat.methods import method as find_method
    from karui.qat.run import quantize_model, read_config
    from karui.qat.types import Options
    from karui.trainers.parity import make_gate, quantized_model

    find_method(method)
    console = Console(highlight=False)
    folder = resolve(model)
    from_hf(read_config(folder))  # a model the engine cannot run is refused before the work, not after it
    rows = _rows(folder, calibration, samples, length) if calibration is not None else None
    with Progress(console=console) as bar:
        task = bar.add_task(f"{method} {spec}")
        result = quantize_model(
            folder,
            method,
            spec,
            rows,
            Options(work=work, progress=lambda done, total, seconds: bar.update(task, completed=done, total=total)),
        )
    grid = QuantSpec.parse(embedding)
    weights: dict[str, Any] = dict(result.weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights and grid.format != "none":
            weights[name] = quantize(weights[name], grid, name=name)
    tied = (("model.embed_tokens.weight", "lm_head.weight"),) if "lm_head.weight" not in weights else ()
    dense = {k: v.dequantize() if hasattr(v, "dequantize") and hasattr(v, "codes") else v for k, v in weights.items()}
    manifest = write(
        output,
        weights,
        result.config,
        tokenizer_dir=folder,
        provenance={"source_model": folder.name, "notes": {"quantization": json.loads(json.dumps(result.facts, default=str))}},
        tied=tied,
        parity=make_gate(folder, lambda _: quantized_model(result.config, dense)),
    )
    console.print(f"{output}: {disk_bytes(output) / 1e6:.1f} MB, parity {json.dumps(manifest.parity)}")
    return manifest


def _rows(folder: Path, text: Path, samples: int, length: int) -> Any:
    import torch

    from karui.catalogue import load_tokenizer
    from karui.inference.evaluate.scoring import read_text

    ids = load_tokenizer(folder)(read_text(text), add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < samples * length:
        raise KaruiError(f"{text} holds {len(ids)} tokens; {samples} samples of {length} need {samples * length}. Ask for fewer.")
    return torch.tensor(ids[: samples * length]).view(samples, length)
