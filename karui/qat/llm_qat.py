"""LLM-QAT (Liu et al., arXiv 2305.17888): data written by the model itself, its logits as the target, KV cache quantized too.

    data      a random first token; the next 3 to 5 tokens greedy, the rest sampled from the full distribution     (section 3.1)
    weights   symmetric min/max, no clipping, per channel (or group)                                               (section 3.2)
    activations and keys, values: symmetric min/max, per token                                                    (section 3.2)
    loss      cross entropy against the unquantized model's distribution (the objective of the run)               (eq. 3)

Keys and values are rounded after their projections, one scale per token and head, before rotary positions are applied; the
engine's int8 cache rounds keys after them. The generator is any callable; a run passes the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from karui.configs.errors import KaruiError
from karui.configs.quantspec import QuantSpec
from karui.qat.activations import fake_quantize_tokens
from karui.qat.fake import Nearest, TokenActivations


class Generator(Protocol):
    """Continues token ids.

    Args:
        prompts: token ids of each text so far.
        tokens: how many to add to each; fewer come back when the model ends the text.
        greedy: the likeliest token each time; else drawn from the full distribution at temperature 1.
        seed: of the draw.

    Returns the added ids of each prompt, in order.
    """

    def __call__(self, prompts: Sequence[Sequence[int]], *, tokens: int, greedy: bool, seed: int) -> list[list[int]]: ...


def generate_data(generate: Generator, *, vocabulary: Sequence[int], samples: int, length: int, seed: int = 0) -> list[list[int]]:
    """Texts of at most `length` tokens, each from a random first token of `vocabulary`; shorter where the model ended them.

    Raises:
        KaruiError: no samples or length asked for, an empty vocabulary, a generator that adds nothing to any text.
    """
    if samples < 1 or length < 8 or not vocabulary:
        raise KaruiError(
            f"LLM-QAT: {samples} samples of {length} tokens from {len(vocabulary)} first tokens cannot train; ask for at least "
            "one sample of 8 tokens."
        )
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(len(vocabulary), (samples,), generator=draw).tolist()
    greedy = torch.randint(3, 6, (samples,), generator=draw).tolist()
    texts: list[list[int]] = [[int(vocabulary[i])] for i in first]
    for count in (3, 4, 5):  # one call for each number of greedy tokens
        chosen = [i for i, n in enumerate(greedy) if n == count]
        if chosen:
            for i, added in zip(chosen, generate([texts[i] for i in chosen], tokens=count, greedy=True, seed=seed)):
                texts[i] += added
    open_ = [i for i, text in enumerate(texts) if len(text) == 1 + greedy[i]]
    by_length: dict[int, list[int]] = {}
    for i in open_:
        by_length.setdefault(length - len(texts[i]), []).append(i)
    for rest, chosen in sorted(by_length.items()):
        for i, added in zip(chosen, generate([texts[i] for i in chosen], tokens=rest, greedy=False, seed=seed + 1 + rest)):
            texts[i] += added
    if max(map(len, texts)) < 3:
        raise KaruiError("LLM-QAT: the model ended every text at once, so there is nothing to train on; check its end token.")
    return texts


class HeadTokens(nn.Module):
    """Keys or values [..., heads * head_dim] rounded with one symmetric scale per token and head."""

    def __init__(self, head_dim: int, bits: int = 8) -> None:
        super().__init__()
        self.head_dim, self.bits = head_dim, bits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quantize_tokens(x.unflatten(-1, (-1, self.head_dim)), self.bits).flatten(-2)


def quantize_kv(model: nn.Module, bits: int = 8) -> list[torch.utils.hooks.RemovableHandle]:
    """Round what every k_proj and v_proj gives; returns the hooks to remove.

    Raises:
        KaruiError: a model without such projections.
    """
    hooks = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("k_proj", "v_proj"):
            attention = model.get_submodule(name.rpartition(".")[0])
            rounding = HeadTokens(int(attention.head_dim), bits)  # type: ignore[arg-type]
            hooks.append(module.register_forward_hook(lambda _, args, out, r=rounding: r(out)))
    if not hooks:
        raise KaruiError(f"{type(model).__name__}: no k_proj or v_proj found, so its cache cannot be fake-quantized.")
    return hooks


def make(activation_bits: int | None):
    """A factory for `karui.qat.fake.prepare`: min/max weights, activations per token."""

    def one(name: str, linear: nn.Linear, spec: QuantSpec) -> tuple[Nearest, nn.Module | None]:
        return Nearest(linear.weight, spec, name), None if activation_bits is None else TokenActivations(activation_bits)

    return one
