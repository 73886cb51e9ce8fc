"""`karui quantize` with a method that trains: a short run of distillation on the calibration text, then the run's export."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError
from karui.configs.manifest import Manifest

OPTIM = ("lr", "steps", "epochs", "batch", "micro_tokens", "weight_decay")


def train_to_bundle(
    model: str, output: Path, *, method: str, spec: str, embedding: str = "w8", calibration: Path, samples: int = 64,
    length: int = 512, work: Path | None = None, settings: Mapping[str, Any] | None = None, skip: Sequence[str] = (),
) -> Manifest:  # fmt: skip
    """Train the model on the grid, its own unquantized distribution over the text as the target, and write what it ends as.

    Args:
        model, output, spec, embedding, calibration, samples, length, skip: as for `quantize_to_bundle`.
        work: folder of the run; one that is there goes on. None: a temporary one.
        settings: of the step (`karui.configs.steps.qat`), and of the optimizer (`OPTIM`).

    Raises:
        KaruiError: what the step, the run or the export refuses.
    """
    from karui.catalogue import load_tokenizer, resolve
    from karui.configs.recipe import Recipe
    from karui.qat.methods import TRAINED
    from karui.trainers.pipeline import export_run
    from karui.trainers.quantize import rows_of_text
    from karui.trainers.run import run_recipe

    left = dict(settings or {})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(work or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source = resolve(model)
        tokenizer = load_tokenizer(source)
        text = folder / "text.jsonl"
        if not text.is_file():
            rows = rows_of_text(source, calibration, samples, length)
            text.write_text("".join(json.dumps({"text": tokenizer.decode(r)}) + "\n" for r in rows.tolist()), encoding="utf-8")
        optim = {"lr": TRAINED[method].lr, "batch": 2, **{k: left.pop(k) for k in OPTIM if k in left}}
        step: dict[str, Any] = {"method": method, "spec": spec, "skip": list(skip), **left}
        if method == "llm_qat":
            step = {"generate": samples, "length": length, **step}
        if method == "bitnet_158":
            step = {"warmup": max(1, (optim.get("steps") or -(-samples // optim["batch"])) // 2), **step}
        recipe = Recipe.build(
            {
                "name": f"{method}-{source.name}", "model": str(model), "prepare": [step], "optim": optim,
                "objective": {"kind": "distil"},
                "data": {"train": str(text), "text": "text", "train_on": "all", "max_length": length, "overlong": "split"},
                "run": {"output": str(folder / "run")}, "track": {"to": "none"},
            },
            f"karui quantize --method {method}",
        )  # fmt: skip
        result = run_recipe(recipe, resume="auto")
        if result.final is None:
            raise KaruiError(f"the run was interrupted; start the same command again with --work {folder} and it goes on.")
        return export_run(result.folder, spec=spec, embedding=embedding, output=output).manifest
