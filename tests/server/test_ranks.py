"""End to end with two CPU processes (gloo): a server in front of a model on two ranks answers as one in front of the whole model does."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from karui.configs.errors import KaruiError
from karui.inference.engine import Engine
from karui.inference.models.decoder import TorchRunner
from karui.inference.models.parallel import PipelineRunner, TensorParallelRunner
from karui.inference.requests import Request, SamplingParams
from karui.inference.server.loop import EngineLoop
from karui.inference.server.ranks import LeadingEngine, control_group, follow
from tests.inference.conftest import tiny
from tests.processes import called

PROMPTS = [[5, 6, 7], list(range(30)), [9] * 12, [3, 1]]
PARAMS = [SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=9, temperature=0.9, seed=4, ignore_eos=True),
          SamplingParams(max_tokens=30, n=2, temperature=0.7, seed=1, ignore_eos=True, stop_token_ids=(7,)),
          SamplingParams(max_tokens=6, beams=3, ignore_eos=True)]  # fmt: skip


def made(runner: Any) -> Engine:
    return Engine(runner, memory="200KiB", block_size=4, max_tokens_per_step=8)


def asked(engine: Any) -> dict[str, Any]:
    """Tokens per request and continuation, through a server's loop: four clients at once, and one that leaves."""
    loop, found, left = EngineLoop(engine), {}, threading.Event()
    loop.start()
    listening = {}

    def ask(i: int) -> None:
        done, tokens = threading.Event(), {}

        def heard(delta: Any) -> None:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            if delta.finish_reason is not None and len(tokens) >= PARAMS[i].n:
                done.set()

        engine.add(Request(prompt=PROMPTS[i], params=PARAMS[i], on_delta=heard))
        listening[i] = done
        assert done.wait(60)
        time.sleep(0.05)
        found[i] = tokens

    def leave(delta: Any) -> bool:
        left.set()
        return False

    engine.add(Request(prompt=[8, 8], params=SamplingParams(max_tokens=60, ignore_eos=True), id="leaves", on_delta=leave))
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(PROMPTS))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert left.wait(60)
    deadline = time.monotonic() + 30
    while engine.has_work and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(KaruiError, match="the prompt is empty"):
        engine.add(Request(prompt=[]))
    loop.stop()
    assert loop._error is None and engine.stats.num_running == 0 and not engine.knows("leaves")
    return found


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _, config, weights = tiny("llama")
    for kind in (TensorParallelRunner, PipelineRunner):
        group, engine = control_group(), made(kind(config, weights))
        if rank:
            follow(engine, group)
            engine.check_integrity()
        else:
            leading = LeadingEngine(engine, group)
            found = asked(leading)
            with pytest.raises(KaruiError, match="serves no adapters"):
                leading.add(Request(prompt=[1], adapter="mine"))
            leading.add(Request(prompt=[1], id="twice"))
            with pytest.raises(KaruiError, match="'twice' is in use"):
                leading.add(Request(prompt=[1], id="twice"))
            leading.abort("twice")
            while leading.has_work:
                leading.step()
            leading.stop()
            Path(folder, f"{kind.__name__}.json").write_text(json.dumps(found))
        Path(folder, f"{kind.__name__}-{rank}.json").write_text(json.dumps(vars(engine.stats)))
    torch.distributed.destroy_process_group()


def test_two_ranks_serve_as_one(tmp_path: Any) -> None:
    called(_rank, str(tmp_path))
    _, config, weights = tiny("llama")
    expected = json.loads(json.dumps(asked(made(TorchRunner(config, weights)))))
    for kind in ("TensorParallelRunner", "PipelineRunner"):
        assert json.loads((tmp_path / f"{kind}.json").read_text()) == expected
        ours, theirs = (json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in (0, 1))
        assert ours == theirs and ours["num_generated_tokens"] > 60


def test_without_torchrun_it_is_told(monkeypatch: Any) -> None:
    from karui.inference.server.run import serve_model

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(KaruiError, match="start it with torchrun"):
        serve_model("smollm2-135m", parallel="tensor")
