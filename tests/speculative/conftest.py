"""A tiny random llama and engines over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from karui.configs.errors import UnsupportedError
from karui.inference.engine import Engine
from karui.inference.models.config import ModelConfig
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.weights import expected_shapes
from karui.inference.requests import SamplingParams
from karui.inference.speculate import Speculation
from karui.inference.speculative.config import SpeculationConfig
from karui.inference.speculative.draft_model import RunnerDrafter
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config
from karui.inference.speculative.factory import Speculator
from karui.inference.speculative.medusa import MedusaHeads

# A chain of the best tokens with the likeliest side branches, 24 nodes over four heads.
CHOICES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 2, 0), (1, 0, 0), (2, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0))


def tiny_config(vocab: int = 61) -> ModelConfig:
    return ModelConfig(model_type="llama", vocab_size=vocab, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
                       num_kv_heads=2, head_dim=8, norm_eps=1e-6, rope_theta=1e4, max_context=256, tied=True)


def tiny_weights(config: ModelConfig, seed: int = 0, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Random weights; `noise` perturbs them, for a draft model that is near its target."""
    g, h = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    out = {}
    for name, shape in sorted(expected_shapes(config).items()):
        base = 1.0 if "norm" in name else 0.0
        out[name] = base + 0.3 * torch.randn(shape, generator=g) + noise * torch.randn(shape, generator=h)
    return out


def assert_new_weights_reach_the_drafts(drafted: Engine) -> None:
    """A native engine with drafts writes plain decoding's tokens behind new weights, which its drafts are then made with."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    drafted.generate([[5, 9, 2]], params)
    other = tiny_weights(tiny_config(), seed=9)
    drafted.update_weights(other)
    fresh = tiny_engine(native=True)
    fresh.update_weights(other)
    assert drafted.generate([[5, 9, 2]], params)[0].token_ids == fresh.generate([[5, 9, 2]], params)[0].token_ids


def tiny_engine(spelling: str | SpeculationConfig | None = None, *, vocab: int = 61, dtype: torch.dtype = torch.float32,
                bit_exact: bool = True, draft_noise: float = 0.02, draft_memory: int | None = None, native: bool = False,
                **options: Any) -> Engine:
    """An engine over the tiny model, speculating as spelled; heads are random, the draft model a perturbed copy."""
    config = tiny_config(vocab)
    weights = tiny_weights(config)
    runner: Any
    if native:
        from karui.inference.models.native import NativeRunner

        try:
            runner = NativeRunner(config, weights)
        except (ImportError, UnsupportedError) as error:
            pytest.skip(f"no native runner here: {error}")
    else:
        runner = TorchRunner(config, weights, dtype=dtype, bit_exact=bit_exact)
    speculation = None
    if spelling is not None:
        spec = SpeculationConfig.parse(spelling) if isinstance(spelling, str) else spelling
        torch.manual_seed(7)
        heads: Any = None
        if spec.method == "medusa":
            heads = MedusaHeads(3, config.hidden_size, vocab).eval()
            for head in heads.heads:        # the target's own head behind each block: right now and then
                head[1].weight.data.copy_(weights["model.embed_tokens.weight"])
        elif spec.method == "eagle3":
            heads = Eagle3(Eagle3Config.of(config), None).eval()
        drafter = None
        if spec.method == "draft":
            near = tiny_weights(config, noise=draft_noise)
            draft: Any = NativeRunner(config, near) if native else TorchRunner(config, near)
            drafter = RunnerDrafter(draft, max_context=256, max_sequences=64, memory=draft_memory)
        embedding = weights["model.embed_tokens.weight"]
        speculator = Speculator(spec, config, heads=heads, embed=lambda ids: embedding[ids], drafter=drafter)
        speculation = Speculation(spec, speculator.new)
    return Engine(runner, speculation=speculation, **{"max_context": 256, "memory": "8MiB", **options})


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's folder, where the catalogue can find or fetch it."""
    from karui.catalogue import resolve
    from karui.configs.errors import KaruiError

    try:
        return Path(resolve("smollm2-135m"))
    except (KaruiError, OSError) as error:
        pytest.skip(f"smollm2-135m is not on this machine: {error}")
