"""Rotation (QuaRot, Ashkboos et al., arXiv 2404.00456; SpinQuant R1 and R2, arXiv 2405.16406): orthogonal matrices that cancel
in the model.

    R1 [width, width]  the residual stream is rotated: embedding and every writer's output by R1, every reader's input by R1^T
    R2 [head, head]    values are rotated per head: v_proj's output by R2, o_proj's input by R2^T

An RMS norm commutes with a rotation only once its weight is folded into its readers, the head included. A tied head then
differs from the
embedding, so R1 unties it: logged, reported, and `tie_word_embeddings` becomes false in the result's config; `r1=False` keeps
the tie.
R is a Hadamard matrix with random signs (times a random orthogonal factor for the odd part of the width). GPTQ or rounding
follows.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from torch import nn

from karui.configs.errors import UnsupportedError
from karui.qat import gptq, rtn
from karui.qat.calibration import Block, decoder_of
from karui.qat.types import LayerReport, MethodConfig

log = logging.getLogger(__name__)


class RotationConfig(MethodConfig):
    """r1, r2: which rotations; then: how the rotated weights are rounded."""

    r1: bool = True
    r2: bool = True
    then: Literal["gptq", "rtn"] = "gptq"


CONFIG = RotationConfig


def orthogonal(n: int, generator: torch.Generator) -> torch.Tensor:
    """Random orthogonal [n, n] fp64: Hadamard of the largest power of two in n, Kronecker a random factor, with random signs."""
    power = n & -n
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    odd = n // power
    factor = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))[0]
    signs = (torch.randint(0, 2, (n,), generator=generator) * 2 - 1).double()
    return torch.kron(factor.contiguous(), hadamard / power**0.5) * signs


def prepare_model(model: nn.Module, config: dict[str, Any], settings: RotationConfig, seed: int) -> list[LayerReport]:
    """Fold norms and rotate, in place, in fp64; the logits stay what they were. Returns the notes for the report.

    Raises:
        UnsupportedError: a block that is not the llama pattern (two RMS norms, q k v o, gate up down), or norms after a sublayer.
    """
    base, layers, _ = decoder_of(model)
    kind = str(getattr(model.config, "model_type", "?"))
    generator = torch.Generator().manual_seed(seed)
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise UnsupportedError(f"rotation follows llama, mistral, qwen2 and qwen3, not {kind}; use gptq.")
    first: Any = layers[0]
    head_dim = first.self_attn.head_dim
    for layer in layers:
        attention: Any = layer.self_attn
        if settings.r2:
            r2 = orthogonal(int(head_dim), generator)
            v, o = attention.v_proj, attention.o_proj
            _set(v.weight, (r2 @ v.weight.double().reshape(-1, len(r2), v.in_features)).reshape(v.weight.shape))
            if v.bias is not None:
                _set(v.bias, (v.bias.double().reshape(-1, len(r2)) @ r2.T).reshape(-1))
            _set(o.weight, (o.weight.double().reshape(o.out_features, -1, len(r2)) @ r2.T).reshape(o.weight.shape))
    if not settings.r1:
        return []
    decoder: Any = base
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    embedding = decoder.embed_tokens
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
        for owner in (config, model.config):
            if isinstance(owner, dict):
                owner["tie_word_embeddings"] = False
            else:
                owner.tie_word_embeddings = False  # type: ignore[union-attr]
        log.warning(
            "rotation unties the head from the embedding: the model grows by %.0f MB",
            head.weight.numel() * head.weight.element_size() / 1e6,
        )
    r1 = orthogonal(embedding.embedding_dim, generator)
    _set(embedding.weight, embedding.weight.double() @ r1)
    for layer in layers:
        part: Any = layer
        for norm, readers in (
            (part.input_layernorm, (part.self_attn.q_proj, part.self_attn.k_proj, part.self_attn.v_proj)),
            (part.post_attention_layernorm, (part.mlp.gate_proj, part.mlp.up_proj)),
        ):
            for reader in readers:
                _set(reader.weight, (reader.weight.double() * norm.weight.double()) @ r1)
            norm.weight.data.fill_(1.0)
        for writer in (part.self_attn.o_proj, part.mlp.down_proj):
            _set(writer.weight, r1.T @ writer.weight.double())
            if writer.bias is not None:
                _set(writer.bias, writer.bias.double() @ r1)
    _set(head.weight, (head.weight.double() * decoder.norm.weight.double()) @ r1)
    decoder.norm.weight.data.fill_(1.0)
    return []


def _set(parameter: torch.Tensor, value: torch.Tensor) -> None:
    parameter.data.copy_(value.to(parameter.dtype))


def quantize_block(block: Block, config: RotationConfig) -> None:
    """Round the rotated linears; norms, now all ones, go into the result too."""
    for name, p in block.module.named_parameters():
        if p.ndim == 1:
            block.weights[f"{block.name}.{name}"] = p.detach().cpu().clone()
    if config.then == "gptq":
        gptq.quantize_block(block, gptq.GPTQConfig())
    else:
        rtn.quantize_block(block, rtn.RTNConfig())
