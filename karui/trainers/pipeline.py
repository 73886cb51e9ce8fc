"""The whole path: recipe -> preflight -> train -> export -> parity gate -> compare. What `karui train` runs."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.configs.recipe import Recipe
from karui.configs.steps import LoraStep

if TYPE_CHECKING:
    from karui.inference.bundle.export import ExportReport
    from karui.inference.evaluate.report import Report
    from karui.trainers.calibrated import Calibration
    from karui.trainers.merging import Merge, MergeChoice
    from karui.trainers.run import RunResult


DRAFT_FILES = ("eagle3.safetensors", "medusa.safetensors")


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """What a whole run left: the training's result, one bundle per export, and the closing comparison (base first)."""

    run: RunResult
    bundles: tuple[Path, ...]
    reports: tuple[Report, ...]


def run_pipeline(
    recipe: str | Path | Recipe, overrides: Sequence[str] = (), *, dry_run: bool = False, resume: bool | str | Path | None = None
) -> PipelineResult:
    """Train as the recipe says, then write its exports and compare them with the model they came from.

    Under `accelerate launch` every rank trains; export and comparison happen on the first rank.
    """
    from karui.inference.bundle.staging import check_target
    from karui.qat.methods import method as find_method
    from karui.trainers.run import run_recipe

    if not isinstance(recipe, Recipe):
        recipe = Recipe.load(recipe, overrides)
    for item in recipe.export:  # what is wrong here should not cost a training run
        find_method(item.method)
        target = item.target(recipe.output)
        if not resume and recipe.output not in target.parents:  # an earlier run's own bundles move aside with it
            check_target(target, overwrite=False)
    if recipe.export and recipe.eval.perplexity and not Path(recipe.eval.perplexity).is_file():
        raise KaruiError(f"eval.perplexity {recipe.eval.perplexity!r}: no such file.")
    result = run_recipe(recipe, resume=resume, dry_run=dry_run, hold_tracker=True)
    try:
        if result.final is None or int(os.environ.get("RANK", "0")) != 0:
            return PipelineResult(run=result, bundles=(), reports=())
        return _export_and_compare(recipe, result, resumed=bool(resume))
    finally:
        if result.tracker is not None:
            result.tracker.finish()


def _export_and_compare(recipe: Recipe, result: RunResult, *, resumed: bool) -> PipelineResult:
    from karui.trainers.calibrated import Calibration
    from karui.trainers.compare import compare
    from karui.trainers.talk import answer

    bundles: list[Path] = []
    for item in recipe.export:
        target = item.target(result.folder)
        if resumed and _made_by(recipe, target):  # what was stopped were the exports after it
            print(f"{target} is there already, made by this recipe: kept")
            bundles.append(target)
            continue
        how = Calibration(method=item.method, samples=item.samples, length=item.length)
        done = export_run(result.folder, spec=item.spec, embedding=item.embedding, output=target, how=how, merge=item.merge)
        bundles.append(done.path)
    if not bundles:
        return PipelineResult(run=result, bundles=(), reports=())
    wanted = recipe.eval
    reports = compare(
        [recipe.model.name, *map(str, bundles)],
        text=Path(wanted.perplexity) if wanted.perplexity else None,
        windows=wanted.windows,
        data=recipe.data if wanted.held_out and (recipe.data.eval or recipe.data.holdout) else None,
        speed=wanted.speed,
    )
    answers = [(q, answer(str(bundles[-1]), q, {"max_tokens": 160}, show_question=True)) for q in wanted.questions]
    if tracker := result.tracker:
        if answers:
            tracker.texts("answers", ("question", "answer"), answers)
        for bundle, report in zip(bundles, reports[1:]):
            tracker.config({f"bundle {bundle.name}": report.to_dict()})
            if recipe.track.artifact:
                tracker.artifact(bundle, kind="bundle", metadata={"recipe": recipe.name})
    return PipelineResult(run=result, bundles=tuple(bundles), reports=tuple(reports))


def _made_by(recipe: Recipe, target: Path) -> bool:
    """Whether a whole bundle of this recipe is in place."""
    from karui.configs.manifest import MANIFEST_NAME, Manifest
    from karui.trainers.checkpoint import as_written

    return (target / MANIFEST_NAME).is_file() and Manifest.read(target).recipe == as_written(recipe)


def export_run(
    run: str | Path, *, output: str | Path, spec: str | QuantSpec = "w4g32", embedding: str | QuantSpec = "w8",
    how: Calibration | None = None, merge: Merge = "auto",
) -> ExportReport:  # fmt: skip
    """Merge a run's adapter into its base, quantize, and write a bundle that passed the parity gate.

    Args:
        run: a run folder with recipe.json and final/.
        spec, embedding: grids of the block linears, and of embedding and output head.
        how: the method that finds the codes and what it is calibrated on; default: rounding to nearest with a scale search.
        merge: which base an adapter over a quantized one is merged into: `auto` measures, `trained` and `original` ask for one.

    Raises:
        KaruiError: not a finished run, a grid that does not fit, a taken target, parity not met, a method for a run whose
            weights are on their grid already.
    """
    from rich.console import Console

    from karui.catalogue import resolve
    from karui.inference.bundle.export import export_model
    from karui.inference.bundle.staging import check_target
    from karui.kernels.qtensor import QTensor
    from karui.qat.methods import method as find_method
    from karui.trainers.calibrated import Calibration, calibrate, held_out_samples, held_out_sequences
    from karui.trainers.converted import load_converted
    from karui.trainers.merging import choose_by_loss, choose_merge
    from karui.trainers.parity import bound_for, make_gate, merged_model

    folder = Path(run)
    if not (folder / "recipe.json").is_file():
        raise KaruiError(f"{folder} is not a run: recipe.json is missing. Give the folder that `karui train` printed.")
    if not (folder / "final").is_dir():
        raise KaruiError(
            f"{folder} has no final/: the run did not finish. Go on with `karui train {folder / 'recipe.json'} --resume`."
        )
    recipe = Recipe.build(json.loads((folder / "recipe.json").read_text(encoding="utf-8")), str(folder / "recipe.json"))
    is_adapter = (folder / "final" / "adapter_config.json").is_file()
    source = resolve(recipe.model.name) if is_adapter else folder / "final"
    adapter = folder / "final" if is_adapter else None
    base = next((step.base for step in recipe.prepare if isinstance(step, LoraStep) and step.base.format != "none"), None)
    quantized: dict[str, Any] = {} if is_adapter else dict(load_converted(folder / "final"))
    console = Console(highlight=False)
    console.print(
        f"export {folder} -> {output}: linears {spec}, embedding {embedding}" + (f", base on {base} as trained" if base else "")
    )
    spec = QuantSpec.parse(str(spec))
    notes: dict[str, Any] = {"run": folder.name}
    how = how or Calibration()
    if quantized and how.method != "rtn":
        raise KaruiError(f"{folder} was trained on its grid, so method {how.method} has nothing to find; leave the method out.")
    if not quantized:
        check_target(Path(output), overwrite=False)  # before the work
    choice: MergeChoice | None = None
    if adapter is not None and base is not None and merge == "auto" and find_method(how.method).calibrates:
        choice = choose_by_loss(source, adapter, base, held_out_samples(recipe, source))
    elif adapter is not None and base is not None:
        choice = choose_merge(source, adapter, base, spec, held_out_sequences(recipe, source), merge)
    if choice is not None:
        base = choice.base
        notes["merge"] = choice.facts()
        console.print(f"  {choice.line()}")
    if not quantized and spec.format != "none":
        found = calibrate(recipe, source, spec, how, adapter=adapter, base=base)
        quantized = found.model.changed
        notes["quantization"] = json.loads(json.dumps(found.facts(), default=str))
        for line in found.lines():
            console.print(f"  {line}")
    grids = [q.spec for q in quantized.values() if isinstance(q, QTensor)]
    report = export_model(
        source,
        str(spec),
        output,
        adapter=adapter,
        base_spec=base,
        embedding_spec=str(embedding),
        quantized=quantized,
        recipe=recipe.dump(),
        provenance={"notes": notes},
        parity=make_gate(
            source,
            lambda manifest: merged_model(source, manifest, adapter=adapter, base_spec=base, quantized=quantized),
            bound_for((spec, *grids)),
        ),
    )
    for row in report.summary():
        console.print(
            f"  {row['tensors']:>4} tensors {row['fate']} {row['spec']}: {row['why']} (relative error {row['error']:.4f})"
        )
    console.print(f"  {report.bundle_bytes / 1e6:.1f} MB, {report.bundle_bytes / report.fp32_bytes:.3f} of the fp32 size")
    console.print("  parity: " + _figures(report.manifest.parity))
    if any((folder / "final" / name).is_file() for name in DRAFT_FILES):
        from karui.trainers.objectives.drafts import pack_drafts

        console.print(f"  packed {', '.join(pack_drafts(folder / 'final', report.path))}")
    return report


def _figures(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in (values or {}).items())
