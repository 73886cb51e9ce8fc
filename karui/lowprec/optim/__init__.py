"""Optimizers with small states: see `adamw.AdamWLowState` and `build.build_optimizer`."""

from __future__ import annotations

from karui.lowprec.optim.adamw import AdamWLowState
from karui.lowprec.optim.build import OPTIMIZERS, build_optimizer, lora_plus_groups

__all__ = ["OPTIMIZERS", "AdamWLowState", "build_optimizer", "lora_plus_groups"]
