"""The states a draft learns from, as the engine computes them: the served codes, int8 activations and cache format included.

A quantized model is not the model it came from (SmolLM2-135M on w4g32, rounded to nearest, chooses another token in one of six
places), and its draft has to follow the one that is served. On a CPU the engine also runs a text several times faster than
torch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from karui.configs.quantspec import QuantSpec
from karui.trainers.model import base_model
from karui.trainers.objectives.engine_sampler import EMBEDDING, dense_weights, make_runner

BLOCK = 16


class EngineStates:
    """Runs one document after the other.

    Args:
        model: the frozen target.
        codes: its quantized weights by parameter name, as an export writes them; embedding and head are then on int8.
        chunk: tokens whose logits exist at one moment.
    """

    def __init__(self, model: nn.Module, codes: Mapping[str, Any], chunk: int) -> None:
        from karui.inference.models.config import from_hf
        from karui.kernels.quantize import quantize

        inner: Any = base_model(model)
        weights = {**dense_weights(model, QuantSpec.parse("none")), **codes}
        if codes:
            for name in ("model.embed_tokens.weight", "lm_head.weight"):
                if isinstance(weights.get(name), torch.Tensor):
                    weights[name] = quantize(weights[name], EMBEDDING, name=name)
        self.runner = make_runner(from_hf(inner.config.to_dict()), weights)
        self.chunk, self._blocks = chunk, 0

    def __call__(self, tokens: torch.Tensor, aux_layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [n] -> (streams entering `aux_layers` [n, layers * H], last hidden states [n, H], likeliest next tokens [n]).

        Without `aux_layers` the streams are [n, 0].
        """
        from karui.inference.batch import StepBatch

        n = len(tokens)
        if n > self._blocks * BLOCK:
            self._blocks = -(-n // BLOCK)
            self.runner.allocate(self._blocks, BLOCK, getattr(self.runner, "default_kv_dtype", "float16"))
        table, ids = torch.arange(self._blocks)[None], tokens.cpu()
        found = []
        for start in range(0, n, self.chunk):
            at = torch.arange(start, min(n, start + self.chunk))
            index = {"tokens": ids[at], "positions": at, "slots": at, "query_starts": torch.tensor([0, len(at)]),
                     "context_lens": torch.tensor([start + len(at)]), "block_tables": table, "logit_rows": torch.arange(len(at))}
            step: Any = {name: values.to(torch.int32) for name, values in index.items()}
            out = self.runner.forward(StepBatch(**step, want_hidden=True, aux_layers=aux_layers))
            aux = out.hidden[:, :0] if out.aux is None else out.aux
            found.append((aux, out.hidden, out.logits.argmax(-1)))
        aux, hidden, best = (torch.cat(parts).to(tokens.device) for parts in zip(*found))
        return aux, hidden, best
