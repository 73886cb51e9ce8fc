"""Quantization-aware training as a step of a run; the techniques are in `karui.qat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from karui.trainers.stages.base import Stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from karui.configs.quantspec import QuantSpec
    from karui.kernels.qtensor import QTensor
    from karui.qat.fake import WeightQuantizer
    from karui.trainers.data import SampleSet


class GridStage(Stage):
    """What all of them share: targeted linears become `QATLinear`, their codes are the result."""

    order = 20
    is_on_grid = True

    def prepare(self, model: Any) -> Any:
        from karui.qat import fake

        names = fake.prepare(model, self.specs(model), self.quantizers)
        self.note = f"{self.step.method}: {fake.names_of(names)} on {self.step.spec}"
        return model

    def specs(self, model: Any) -> dict[str, QuantSpec]:
        """The grid of every targeted linear; refuses an already quantized model and patterns that match nothing."""
        from karui.qat.calibration import decoder_of
        from karui.qat.run import choose, refuse_quantized

        refuse_quantized(model, model.config.to_dict())
        _, layers, prefix = decoder_of(model)
        return choose(layers, prefix, self.step.spec, self.step.targets, self.step.skip, {})

    def quantizers(self, name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[WeightQuantizer, nn.Module | None]:
        raise NotImplementedError

    def lines(self) -> list[str]:
        return [self.note]

    def finish(self, model: Any) -> None:
        from karui.qat import fake

        fake.finish(model)

    def convert(self, model: Any) -> dict[str, QTensor]:
        from karui.qat import fake

        return fake.convert(model)


class LearnedGridStage(GridStage):
    """LSQ, LSQ+, PACT, SEQ."""

    def quantizers(self, name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[WeightQuantizer, nn.Module | None]:
        from karui.qat.fake import Nearest, TokenActivations

        method, tokens = self.step.method, TokenActivations() if spec.activation_bits == 8 else None
        if method == "lsq":
            from karui.qat.lsq import LSQ

            return LSQ(linear.weight, spec, start=self.step.start, name=name), tokens
        if method == "seq":
            from karui.qat.seq import SEQ

            return SEQ(linear.weight, spec, name=name), tokens
        if method == "lsq_plus":
            from karui.qat.lsq_plus import LSQPlus, LSQPlusActivations

            return LSQPlus(linear.weight, spec, start=self.step.start, name=name), LSQPlusActivations(self.step.activation_bits)
        from karui.qat.pact import PACT

        return Nearest(linear.weight, spec, name), PACT(self.step.activation_bits)

    def lines(self) -> list[str]:
        if self.step.method not in ("lsq_plus", "pact"):
            return super().lines()
        after = "per token" if self.step.spec.activation_bits == 8 else "in full (the spec does not end in a8)"
        return [*super().lines(), f"learned activation ranges shape the training and end with it: the engine takes them {after}"]

    def param_groups(self, model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from karui.qat.fake import qat_linears, quantizer_parameters

        optim, linears = self.context.recipe.optim, qat_linears(model).values()
        ranges = [p for m in linears if m.input_quantizer is not None for p in m.input_quantizer.parameters()]
        known = {id(p) for p in ranges}
        steps = [p for p in quantizer_parameters(model) if id(p) not in known]
        known |= {id(p) for p in steps}
        rest = [{**g, "params": [p for p in g["params"] if id(p) not in known]} for g in groups]
        decay = optim.weight_decay if self.step.method == "pact" else 0.0
        return [*rest, {"params": steps, "weight_decay": 0.0, "lr_scale": self.step.lr_ratio},
                {"params": ranges, "weight_decay": decay, "lr_scale": self.step.range_lr / optim.lr}]


class BitNetStage(GridStage):
    """BitNet and BitNet b1.58."""

    def prepare(self, model: Any) -> Any:
        from karui.qat import bitnet

        self.blend = bitnet.Blend(0.0 if self.step.warmup else 1.0)
        if self.step.start == "scratch":
            model = bitnet.from_scratch(model)
        if self.step.sub_norms:
            model = bitnet.with_sub_norms(model)
        return super().prepare(model)

    def quantizers(self, name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[WeightQuantizer, nn.Module | None]:
        from karui.qat.bitnet import BlendedActivations, BlendedWeight

        activation = BlendedActivations(self.blend) if spec.activation_bits == 8 else None
        return BlendedWeight(linear.weight, spec, self.blend, name=name), activation

    def before_step(self, step: int, total: int) -> None:
        self.blend.at(step, self.step.warmup)

    def convert(self, model: Any) -> dict[str, QTensor]:
        from karui.qat.bitnet import check_converged

        check_converged(self.blend)
        return super().convert(model)


class LlmQatStage(GridStage):
    """LLM-QAT; the engine writes the data before training."""

    def prepare(self, model: Any) -> Any:
        from karui.qat.llm_qat import quantize_kv

        model = super().prepare(model)
        self.hooks = quantize_kv(model, self.step.kv_bits) if self.step.kv_bits is not None else []
        return model

    def quantizers(self, name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[WeightQuantizer, nn.Module | None]:
        from karui.qat.llm_qat import make

        made: tuple[WeightQuantizer, nn.Module | None] = make(8 if spec.activation_bits == 8 else None)(name, linear, spec)
        return made

    def training_samples(self, samples: SampleSet) -> SampleSet:
        import numpy as np

        from karui.qat.llm_qat import generate_data
        from karui.trainers.data import SampleSet
        from karui.trainers.data.types import Sample

        if not self.step.generate:
            return samples
        tokenizer = self.context.tokenizer
        special = set(tokenizer.all_special_ids)
        texts = generate_data(
            engine_generator(self.context.model_folder), vocabulary=[i for i in range(len(tokenizer)) if i not in special],
            samples=self.step.generate, length=self.step.length, seed=self.context.recipe.run.seed,
        )  # fmt: skip
        rows = []
        for i, ids in enumerate(texts):
            mask = np.ones(len(ids), bool)
            mask[0] = False  # the random first token was nobody's choice
            rows.append(Sample(ids=np.array(ids, np.int32), loss_mask=mask, source_row=i))
        self.note += f"; trained on {len(rows)} samples of its own, {sum(map(len, texts)):,} tokens"
        return SampleSet.of([r for r in rows if len(r.ids) > 1], source="written by the model itself", format="text")

    def finish(self, model: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        super().finish(model)


def engine_generator(folder: Path) -> Any:
    """A `karui.qat.llm_qat.Generator` over the engine."""
    from karui.inference.engine import Engine
    from karui.inference.requests import Request, SamplingParams

    engine = Engine.load(folder, max_sequences=32)

    def generate(prompts: Sequence[Sequence[int]], *, tokens: int, greedy: bool, seed: int) -> list[list[int]]:
        heat = 0.0 if greedy else 1.0
        params = [SamplingParams(temperature=heat, seed=seed * 1_000_003 + i, max_tokens=tokens) for i in range(len(prompts))]
        return [list(o.token_ids) for o in engine.generate([Request(prompt=list(p), params=q) for p, q in zip(prompts, params)])]

    return generate


class QatLoraStage(GridStage):
    """An adapter inside the rounding; everything else is frozen."""

    def prepare(self, model: Any) -> Any:
        model.requires_grad_(False)
        return super().prepare(model)

    def quantizers(self, name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[WeightQuantizer, nn.Module | None]:
        from karui.qat.fake import Nearest, TokenActivations
        from karui.qat.lsq import LSQ
        from karui.qat.qat_lora import AdaptedWeight

        w = linear.weight
        inner: WeightQuantizer = Nearest(w, spec, name)
        if spec.format == "int" or self.step.learn_steps:
            inner = LSQ(w, spec, name=name)
            inner.step.requires_grad_(self.step.learn_steps)
        adapted = AdaptedWeight(w, inner, rank=self.step.rank, alpha=self.step.alpha)
        return adapted, TokenActivations() if spec.activation_bits == 8 else None


class EfficientQatStage(GridStage):
    """Block-AP while preparing (a resumed run does it again, with the same result), then step sizes train in the run."""

    def prepare(self, model: Any) -> Any:
        from karui.catalogue.helpers import take_batches
        from karui.kernels.qtensor import QTensor
        from karui.qat.efficient_qat import swap_in
        from karui.qat.run import quantize_loaded
        from karui.qat.types import Options
        from karui.trainers.calibrated import Calibration, rows_of

        step = self.step
        rows = rows_of(self.context.samples, Calibration(method=step.method, samples=step.samples, length=step.length))
        options = Options(
            settings={**step.settings, "e2e_epochs": 0}, targets=step.targets, skip=step.skip, seed=self.context.recipe.run.seed
        )
        attention = model.config._attn_implementation
        take_batches(model)  # the attention of packed rows takes one row at a time, Block-AP several
        found = quantize_loaded(model, model.config.to_dict(), step.method, step.spec, rows, options)
        model.set_attn_implementation(attention)
        codes = {n: q for n, q in found.changed.items() if isinstance(q, QTensor)}
        self.linears = swap_in(model, codes)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(".a") or (step.norms and parameter.ndim == 1))
        self.note = f"efficient_qat: {len(codes)} linears on {step.spec} after Block-AP; now their step sizes train"
        return model

    def finish(self, model: Any) -> None:
        from karui.qat.efficient_qat import swap_out

        swap_out(model, self.linears)

    def convert(self, model: Any) -> dict[str, QTensor]:
        return {name: m.qtensor() for name, m in self.linears.items()}
