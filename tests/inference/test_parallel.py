"""End to end with two CPU processes (gloo): a model on two ranks answers as it does on one, and what it cannot serve is refused."""

import dataclasses

import pytest
import torch

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.parallel import PipelineRunner, TensorParallelRunner
from karui.inference.requests import Request, SamplingParams
from karui.kernels.quantize import quantize
from tests.inference import test_latent as latent
from tests.inference.conftest import tiny
from tests.processes import called

RUNNERS = {"tensor": TensorParallelRunner, "pipeline": PipelineRunner}
# kind of model, the grid of its linears, who serves it on ranks
CASES = {
    "llama": ("llama", None, RUNNERS), "w4g8": ("llama", "w4g8", RUNNERS), "per row": ("llama", "w8", RUNNERS),
    "groups that a cut goes through": ("llama", "w4g16a", RUNNERS), "biases": ("qwen2", None, RUNNERS),
    "windows and head norms": ("qwen3", None, RUNNERS), "experts": ("mixtral", None, ["pipeline"]),
    "soft caps": ("gemma2", None, RUNNERS), "layers without RoPE": ("smollm3", None, RUNNERS),
    "side by side": ("cohere2", None, RUNNERS), "latent": ("deepseek_v3", None, ["pipeline"]),
    "indexer": ("deepseek_v32", None, ["pipeline"]),
}


def model_of(case):
    kind, spec, _ = CASES[case]
    extra = {"mixtral": dict(num_local_experts=4), "gemma2": dict(sliding_window=7), "cohere2": dict(sliding_window=7),
             "smollm3": dict(no_rope_layers=[1, 0, 0], pad_token_id=0)}.get(kind, {})
    if kind.startswith("deepseek"):
        extra = {**latent.SIZES, **latent.DSA}
    _, config, weights = tiny(kind, **extra)
    if spec:
        linears = [name for name, w in weights.items() if name.endswith("proj.weight")]
        weights |= {name: quantize(weights[name], QuantSpec.parse(spec)) for name in linears}
    if kind == "qwen3":
        config = dataclasses.replace(config, sliding_window=(7, None, 7))
    return config, weights


def answers(runner):
    engine = Engine(runner, memory="200KiB", block_size=4, max_tokens_per_step=8)
    draws = [SamplingParams(max_tokens=10, ignore_eos=True), SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, seed=3)]
    outputs = engine.generate([Request(prompt=[5 + i, 7, 11, *range(20, 20 + 6 * i)], params=draws[i % 2]) for i in range(4)])
    free = engine.generate([Request(prompt=[9, 8], params=SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0))])[0]
    engine.check_integrity()
    return [o.token_ids for o in outputs], free.token_ids, engine.pool.num_blocks


def _rank(rank, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for case, (_, _, served) in CASES.items():
        config, weights = model_of(case)
        for name in served:
            runner = RUNNERS[name](config, weights)
            found[case, name] = *answers(runner), runner.weight_bytes()
    config, weights = model_of("llama")
    for changes in ({"num_heads": 3, "num_kv_heads": 1}, {"intermediate_size": 81}):
        with pytest.raises(UnsupportedError, match="2 ranks do not divide the model's"):
            TensorParallelRunner(dataclasses.replace(config, **changes), weights)
    config, weights = model_of("experts")
    with pytest.raises(UnsupportedError, match="no mixtures of experts"):
        TensorParallelRunner(config, weights)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_a_model_on_two_ranks_answers_as_on_one(tmp_path):
    called(_rank, str(tmp_path))
    ours, theirs = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for (case, name), (tokens, free, blocks, held) in ours.items():
        runner = TorchRunner(*model_of(case))
        assert tokens == answers(runner)[0], (case, name)
        assert theirs[case, name][:3] == (tokens, free, blocks), (case, name)  # drawn without a seed, too
        dequantized = case.startswith("groups") and name == "tensor"  # o and down, before they are cut
        assert held < (1.0 if dequantized else 0.9) * runner.weight_bytes(), (case, name)


def test_what_needs_one_process_is_refused(tmp_path):
    with pytest.raises(KaruiError, match="start the script with torchrun"):
        PipelineRunner(*model_of("llama"))
    with pytest.raises(UnsupportedError, match="without speculation"):
        Engine.load(_folder(tmp_path), parallel="tensor", speculation="ngram:4")
    with pytest.raises(KaruiError, match="parallel 'data' is not known; use tensor or pipeline"):
        Engine.load(_folder(tmp_path), parallel="data")


def _folder(where):
    model, _, _ = tiny("llama")
    model.save_pretrained(where / "model")
    return where / "model"
