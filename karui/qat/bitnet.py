"""BitNet (Wang et al., arXiv 2310.11453): binary weights, and the norms that both BitNets put before their quantizers.

    W~ = sign(W - mean W) mean|W|                                                                (eq. 1-3)
    x~ = round(127 x / max|x|) max|x| / 127 per token, on the output of a norm                   (eq. 4, 5)

Departures: the absmax is per token in training too, as at inference, not per tensor. q, k, v, gate and up read a norm's output
already in a Llama-like model; the two linears that do not, o_proj and down_proj, get a norm of their own (`with_sub_norms`): the
architecture of the published b1.58 models (`bitnet` in transformers). `mean W` centres the codes only: nothing stores it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from karui.configs.errors import UnsupportedError
from karui.qat.bitnet_158 import Blend, BlendedActivations, BlendedWeight, check_converged, make

__all__ = ["Blend", "BlendedActivations", "BlendedWeight", "check_converged", "from_scratch", "make", "with_sub_norms"]


def with_sub_norms(model: Any) -> nn.Module:
    """The same model with an RMSNorm before every o_proj and down_proj, as transformers' `BitNetForCausalLM`.

    Weights are taken over, the new norms start at 1. The norms change what a pretrained model computes, so it has to be trained.

    Raises:
        UnsupportedError: a model that is not Llama-like (biases, other norms), whose weights would not fit.
    """
    from transformers import BitNetConfig, BitNetForCausalLM

    config = model.config
    if config.model_type == "bitnet":
        return model
    if config.model_type not in ("llama", "mistral"):
        raise UnsupportedError(
            f"sub-norms: a {config.model_type} model has no counterpart with sub-norms; start from a llama or mistral model."
        )
    same = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures", "transformers_version")}
    changed = BitNetForCausalLM._from_config(
        BitNetConfig(**same), attn_implementation=config._attn_implementation, dtype=next(model.parameters()).dtype
    )
    missing, unexpected = changed.load_state_dict(model.state_dict(), strict=False)
    foreign = [n for n in missing if not n.endswith("_sub_norm.weight") and n != "lm_head.weight"] + list(unexpected)
    if foreign:
        raise UnsupportedError(f"sub-norms: {len(foreign)} weights of this model do not fit, first {foreign[0]!r}.")
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if name.endswith("_sub_norm.weight"):
                parameter.fill_(1)
    return changed.train(model.training)


def from_scratch(model: Any) -> nn.Module:
    """A model of the same shape with fresh random weights, drawn from torch's global generator."""
    fresh: nn.Module = type(model)._from_config(
        model.config, attn_implementation=model.config._attn_implementation, dtype=next(model.parameters()).dtype
    )
    return fresh.train(model.training)
