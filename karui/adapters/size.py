"""How many parameters an adapter step trains, from shapes alone: `model` may be a skeleton without storage."""

from __future__ import annotations

from typing import Any

from karui.adapters.targets import check_rank, resolve_lora_targets, resolve_modules, resolve_targets
from karui.configs.section import Section
from karui.configs.steps import Ia3Step, LoraStep, PromptStep, VeraStep


def adapter_size(model: Any, step: Section) -> tuple[list[str], int] | None:
    """(linears with an adapter, trained parameters); None for a step that is not an adapter.

    Raises:
        KaruiError: targets that match nothing, or a rank above a matrix's dimensions.
    """
    if isinstance(step, LoraStep):
        targets = resolve_lora_targets(model, step.targets)
        check_rank(model, targets, step.rank)
        also = resolve_modules(model, step.train_also) if step.train_also else []
        whole = sum(p.numel() for n in also for p in model.get_submodule(n).parameters(recurse=False))
        magnitudes = sum(out for _, out in _shapes(model, targets)) if step.dora else 0
        return targets, whole + magnitudes + sum(step.rank * (width + out) for width, out in _shapes(model, targets))
    if isinstance(step, VeraStep):
        targets = resolve_targets(model, step.targets)
        return targets, sum(step.rank + out for _, out in _shapes(model, targets))
    if isinstance(step, Ia3Step):
        targets = resolve_targets(model, step.targets)
        inner = set(resolve_targets(model, step.feedforward)) if step.feedforward else set()
        return targets, sum(width if n in inner else out for n, (width, out) in zip(targets, _shapes(model, targets)))
    if isinstance(step, PromptStep):
        config = model.config.get_text_config()
        if step.method == "prompt":
            return [], step.tokens * config.hidden_size
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return [], step.tokens * 2 * config.num_hidden_layers * heads * size
    return None


def _shapes(model: Any, names: list[str]) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in (model.get_submodule(n) for n in names)]
