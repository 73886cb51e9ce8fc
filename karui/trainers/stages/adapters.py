"""Adapters as a step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from karui.trainers.stages.base import Context, Stage

EVA_TOKENS, EVA_BATCHES = 2048, 16


class AdapterStage(Stage):
    """What the kinds share: the files."""

    order = 30
    is_adapter = True

    def save(self, model: Any, folder: Path) -> None:
        from karui.adapters.files import write_adapter

        write_adapter(model, folder, base=self.context.base, base_name=self.context.recipe.model.name,
                      base_spec=getattr(self.step, "base", None))

    def restore(self, model: Any, folder: Path) -> None:
        from karui.adapters.files import adapter_values, load_values

        load_values(model, adapter_values(folder), str(folder))


def leave_file(model: torch.nn.Module) -> None:
    """Copy what is left of the loaded weights out of their mapped file, whose pages else stay resident beside the codes."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


class LoraStage(AdapterStage):
    """See `karui.adapters.lora`, and `karui.adapters.lora_plus` for the groups of the optimizer."""

    def prepare(self, model: Any) -> Any:
        from karui.adapters.lora import attach

        attached = attach(model, self.step, look=self._look() if self.step.init == "eva" else None).model
        if self.step.base.format != "none":
            leave_file(attached)
        return attached

    def param_groups(self, model: Any, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from karui.adapters.lora_plus import plus_groups

        return plus_groups(model, groups, ratio=self.step.lr_ratio, embedding_lr=self.step.embedding_lr,
                           lr=self.context.recipe.optim.lr)

    def restore(self, model: Any, folder: Path) -> None:
        from karui.adapters.files import resume_values

        resume_values(model, folder, self._original)

    def _look(self) -> Any:
        """The first samples, packed, for `init: eva`."""
        from karui.adapters.lora import Look
        from karui.trainers.data import collate, plan_epoch
        from karui.trainers.model import base_model, documents_of

        samples = self.context.samples
        plan = plan_epoch(samples.lengths, batch=len(samples), micro_tokens=EVA_TOKENS, shuffle=False)
        batches = [collate([samples[i] for i in micro]) for micro in plan[0][:EVA_BATCHES]]

        def forward(model: Any, batch: Any) -> None:
            body = base_model(model).get_decoder()  # type: ignore[operator]
            body(input_ids=batch.tokens.unsqueeze(0), position_ids=batch.positions.unsqueeze(0), use_cache=False,
                 **documents_of(body, batch.cu_seqlens))

        return Look(batches=batches, forward=forward)

    def _original(self, name: str) -> torch.Tensor:
        """The weight [out, in] of a linear as the model's folder has it."""
        from safetensors import safe_open

        from karui.configs.errors import KaruiError

        for path in sorted(self.context.model_folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if f"{name}.weight" in file.keys():  # noqa: SIM118
                    return file.get_tensor(f"{name}.weight")
        raise KaruiError(f"{self.context.model_folder} has no {name}.weight, needed to make the checkpoint's base again.")


class UnmergedStage(AdapterStage):
    """A kind that a bundle cannot hold; a recipe that wants one is refused before it trains."""

    def __init__(self, step: Any, context: Context) -> None:
        from karui.configs.errors import UnsupportedError

        super().__init__(step, context)
        if context.recipe.export:
            raise UnsupportedError(f"prepare: {step.method} cannot be merged into the weights, so no bundle can hold it; "
                                   "leave export out, or use lora.")


class VeraStage(UnmergedStage):
    """See `karui.adapters.vera`."""

    def prepare(self, model: Any) -> Any:
        from karui.adapters.vera import attach_vera

        return attach_vera(model, self.step)


class Ia3Stage(UnmergedStage):
    """See `karui.adapters.ia3`."""

    def prepare(self, model: Any) -> Any:
        from karui.adapters.ia3 import attach_ia3

        return attach_ia3(model, self.step)


class PromptStage(UnmergedStage):
    """See `karui.adapters.soft_prompt`."""

    def prepare(self, model: Any) -> Any:
        from karui.adapters.soft_prompt import attach_prompt

        return attach_prompt(model, self.step, self.context.tokenizer)
