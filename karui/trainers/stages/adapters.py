"""LoRA and QLoRA as a step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from karui.trainers.stages.base import Stage


class LoraStage(Stage):
    """See `karui.adapters.lora`."""

    order = 30
    is_adapter = True

    def prepare(self, model: Any) -> Any:
        from karui.adapters.lora import attach

        return attach(model, self.step).model

    def save(self, model: Any, folder: Path) -> None:
        from karui.adapters.lora import write_adapter

        write_adapter(model, folder, base=self.context.base, base_name=self.context.recipe.model.name, base_spec=self.step.base)

    def restore(self, model: Any, folder: Path) -> None:
        from karui.adapters.lora import adapter_values, load_values

        load_values(model, adapter_values(folder), str(folder))
