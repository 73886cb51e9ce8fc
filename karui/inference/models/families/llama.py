"""Llama: all is as `common` has it."""

from __future__ import annotations

from karui.inference.models.families.common import Config, Fields


def llama(config: Config) -> Fields:
    return {}
