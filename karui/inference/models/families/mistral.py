"""Mistral's models: windows, and Mixtral's experts (arXiv 2401.04088)."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields, every_layer, windows


def mistral(config: Config) -> Fields:
    return windows(config)


def ministral(config: Config) -> Fields:
    return windows(config)


def mixtral(config: Config) -> Fields:
    return {**windows(config), "mixture": every_layer(config, config["num_local_experts"], config["intermediate_size"])}
