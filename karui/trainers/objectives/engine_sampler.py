"""The engine as a sampler of the model in training: same architecture, weights pushed in place, nothing written to disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from karui.adapters.quantized_linear import QuantizedLinear
from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.distill.on_policy.rollout import Drawn
from karui.trainers.model import base_model

logger = logging.getLogger(__name__)
EMBEDDING = QuantSpec.parse("w8")
"""Grid of embedding and head when the linears are on one; on a small model they are the largest read of a step."""


class EngineSampler:
    """A `karui.distill.on_policy.rollout.Sampler`.

    Args:
        model: the model in training; its weights are copied now and with every `push`.
        spec: grid of the decoder's linears in the sampler, "none" for the trainer's own values throughout.
        end: tokens that end a turn.
        temperature, top_p: of the draws.
        max_context: tokens of prompt and continuation.

    Attributes:
        num_tokens, seconds: written so far, and the time it took, weights pushed included.
    """

    def __init__(self, model: nn.Module, *, spec: QuantSpec, end: Sequence[int], temperature: float = 1.0, top_p: float = 1.0,
                 max_context: int = 1024, max_sequences: int = 64) -> None:
        from karui.inference.engine import Engine
        from karui.inference.models.config import from_hf

        self.spec, self.temperature, self.top_p = spec, temperature, top_p
        config = from_hf(base_model(model).config.to_dict())  # type: ignore[union-attr,operator]
        weights = dense_weights(model, spec)
        runner = make_runner(config, weights)
        self.engine = Engine(runner, None, eos_token_ids=list(end), max_context=max_context, max_sequences=max_sequences,
                             kv_dtype="float32" if spec.format == "none" and not torch.cuda.is_available() else "auto")
        self.end = frozenset(end)
        self.version = 0
        self.num_tokens, self.seconds = 0, 0.0

    def push(self, model: nn.Module, version: int) -> None:
        """Swap in the model's weights as they are now."""
        begin = time.perf_counter()
        self.engine.update_weights(dense_weights(model, self.spec), version)
        self.version = version
        self.seconds += time.perf_counter() - begin

    def generate(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], max_tokens: Sequence[int]) -> list[Drawn]:
        from karui.inference.requests import Request, SamplingParams

        begin = time.perf_counter()
        requests = [
            Request(prompt=p.tolist(), params=SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=s, max_tokens=n,
                                                             logprobs=0))
            for p, s, n in zip(prompts, seeds, max_tokens, strict=True)
        ]
        out = []
        for result in self.engine.generate(requests):
            done = result.completions[0]
            if done.finish_reason == "error" or done.logprobs is None:
                raise KaruiError(f"a rollout failed: {done.error}. The weights in training are damaged; lower optim.lr or resume "
                                 "from an earlier checkpoint.")
            out.append(Drawn(np.array(done.token_ids, np.int64), np.array([t.processed for t in done.logprobs]),
                             np.array([t.raw for t in done.logprobs]), done.finish_reason == "stop"))
            self.num_tokens += len(done.token_ids)
        self.seconds += time.perf_counter() - begin
        return out


@torch.no_grad()
def dense_weights(model: nn.Module, spec: QuantSpec) -> dict[str, Any]:
    """The model's weights by checkpoint name: adapters merged; linears of the decoder, each expert's too, on `spec`, embedding
    and head on int8; routers as they are.

    Raises:
        UnsupportedError: a layer whose weight is not a base weight, or a base weight plus a low-rank product.
    """
    from karui.inference.models.weights import CORRECTION, WIDE, canonical, canonical_name
    from karui.kernels.quantize import quantize
    from karui.qat.experts import left_alone

    inner = base_model(model)
    out: dict[str, Any] = {}
    for name, module in inner.named_modules():
        if isinstance(fused := getattr(module, "gate_up_proj", None), nn.Parameter) and fused.ndim == 3:
            for key, w in canonical({f"{name}.{n}": p.detach() for n, p in module.named_parameters(recurse=False)}).items():
                assert isinstance(w, torch.Tensor)
                matrix = w.ndim == 2 and spec.format != "none"
                out[key] = quantize(w.float(), spec, name=key) if matrix else w.float().clone()
            continue
        weight = _weight(module)
        if weight is None or ".lora_" in name or ".base_layer" in name:
            continue
        key = f"{name}.weight"
        linear = module is not inner.get_output_embeddings() and weight.ndim == 2 and not isinstance(module, nn.Embedding)  # type: ignore[operator]
        matrix = weight.ndim == 2 and spec.format != "none" and not left_alone(key)
        out[key] = quantize(weight.float(), spec if linear else EMBEDDING, name=key) if matrix else weight.float().clone()
        bias = getattr(getattr(module, "base_layer", module), "bias", None)
        if isinstance(bias, torch.Tensor):
            out[f"{name}.bias"] = bias.detach().float().clone()
    out |= {name: buffer.float().clone() for name, buffer in inner.named_buffers()
            if canonical_name(name).endswith(CORRECTION)}
    out |= {name: p.detach().float().clone() for name, p in inner.named_parameters()
            if name.rpartition(".")[2] in (*WIDE, CORRECTION)}
    if inner.config.tie_word_embeddings:  # type: ignore[union-attr]
        out.pop("lm_head.weight", None)
    return out


def _weight(module: nn.Module) -> torch.Tensor | None:
    """What a module multiplies with, adapter merged; None for modules without a weight of their own."""
    base = getattr(module, "base_layer", None)
    if base is not None and hasattr(module, "get_delta_weight"):
        if getattr(module, "lora_magnitude_vector", None):
            raise UnsupportedError("on-policy rollouts do not know DoRA's magnitudes; train a plain LoRA or whole weights.")
        total = _weight(base)
        assert total is not None
        for adapter in module.active_adapters:  # type: ignore[union-attr]
            total = total + module.get_delta_weight(adapter).to(total.dtype)  # type: ignore[operator]
        return total
    if isinstance(module, QuantizedLinear):
        return module.dequantize()
    weight = getattr(module, "weight", None)
    return weight.detach() if isinstance(weight, torch.Tensor) else None


def make_runner(config: Any, weights: Mapping[str, Any]) -> Any:
    """The fastest runner here for weights in memory: on a GPU Triton's in bf16, on a CPU the native one on torch's number of
    threads; torch's in fp32 for models that these do not serve."""
    from karui.inference.models.decoder import TorchRunner

    if not torch.cuda.is_available():
        try:
            from karui.inference.models.native import NativeRunner, default_threads

            return NativeRunner(config, dict(weights), threads=min(default_threads(), torch.get_num_threads()))
        except (ImportError, UnsupportedError) as error:
            logger.info("rollouts: the torch runner, because the native one cannot serve this model: %s", error)
            return TorchRunner(config, dict(weights), torch.device("cpu"), torch.float32, False)
    from karui.inference.models.gpu import TritonRunner, unsuited

    device = torch.device("cuda")
    if reason := unsuited(config, device):
        logger.info("rollouts: the torch runner, because the triton one cannot serve this model: %s", reason)
        return TorchRunner(config, dict(weights), device, torch.float32, False)
    return TritonRunner(config, dict(weights), device, torch.bfloat16)
