"""Families of models: a file per maker, in it a function per model type that says what is its own in a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable

from karui.inference.models.families.bitnet import bitnet
from karui.inference.models.families.cohere import cohere, cohere2
from karui.inference.models.families.common import Config, Fields, common
from karui.inference.models.families.deepseek import deepseek_v2, deepseek_v3, deepseek_v32
from karui.inference.models.families.dots import dots1
from karui.inference.models.families.ernie import ernie4_5, ernie4_5_moe
from karui.inference.models.families.exaone import exaone4, exaone_moe
from karui.inference.models.families.gemma import gemma, gemma2, gemma3_text
from karui.inference.models.families.glm import glm, glm4, glm4_moe, glm4_moe_lite, glm_moe_dsa
from karui.inference.models.families.gpt_oss import gpt_oss
from karui.inference.models.families.granite import bamba, granite, granitemoe, granitemoehybrid, granitemoeshared
from karui.inference.models.families.hunyuan import hunyuan_v1_dense
from karui.inference.models.families.lfm2 import lfm2, lfm2_moe
from karui.inference.models.families.llama import cwm, llama
from karui.inference.models.families.minimax import minimax_m2
from karui.inference.models.families.mistral import ministral, mistral, mixtral
from karui.inference.models.families.olmo import olmo2, olmo3, olmoe
from karui.inference.models.families.phi import phi3
from karui.inference.models.families.qwen import qwen2, qwen2_moe, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next
from karui.inference.models.families.seed_oss import seed_oss
from karui.inference.models.families.smollm3 import smollm3
from karui.inference.models.families.solar import solar_open

FAMILIES: dict[str, Callable[[Config], Fields]] = {family.__name__: family for family in (
    llama, cwm, mistral, ministral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text,
    bitnet, phi3, gemma, gemma2, gemma3_text, olmo2, olmo3, olmoe, gpt_oss, deepseek_v2, deepseek_v3, deepseek_v32, dots1, glm,
    glm4, glm4_moe, glm4_moe_lite, glm_moe_dsa, lfm2, lfm2_moe, bamba, granite, granitemoe, granitemoeshared, granitemoehybrid,
    smollm3, seed_oss, ernie4_5, ernie4_5_moe, exaone4, exaone_moe, hunyuan_v1_dense, minimax_m2, solar_open, cohere, cohere2)}
"""Model type -> what makes its own fields. To add one: its function, its name here, its tensors' names in `models/weights.py`."""

__all__ = ["FAMILIES", "common"]
