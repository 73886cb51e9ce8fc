"""Reference and behavioural: the preflight's numbers against counted parameters, measured saved tensors, counted operations."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config

from karui.adapters.lora import attach
from karui.configs.errors import KaruiError
from karui.configs.recipe import Recipe
from karui.kernels.native import train as native_train
from karui.trainers.data import Sample, SampleSet, collate
from karui.trainers.estimate import (
    activation_bytes_per_layer,
    after_attention,
    memory,
    shape_of,
    skeleton,
    step_flops,
    trained_by,
)
from karui.trainers.model import ATTENTION, LossSum, enable_recompute, install_lean_ops, register_attention
from karui.trainers.preflight import SLACK, Rate, dry_run, histogram, pieces, preflight, render

SIZES = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=320)
CONFIGS = {"llama": LlamaConfig(**SIZES, tie_word_embeddings=True), "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False)}
PREPARE = {
    "full": [],
    "lora": [{"method": "lora", "rank": 8}],
    "lora_qv": [{"method": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}],
    "qlora": [{"method": "qlora", "rank": 8}],
}
RATE = Rate(flops_per_s=1e11, backward_flops_per_s=1e11, bytes_per_s=1e10, device="cpu")
both = pytest.mark.parametrize("kind", CONFIGS)
all_ways = pytest.mark.parametrize("way", PREPARE)


def recipe(way="full", **sections):
    return Recipe.build({"name": "tiny", "model": "x", "data": {"train": "x"}, "prepare": PREPARE[way], **sections})


def built(kind, way, recompute=False):
    """(recipe, shape, trained, the real module that trains): what the loop puts together, on random weights."""
    torch.manual_seed(0)
    register_attention()
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation=ATTENTION)
    plan = recipe(way, run={"recompute": "full" if recompute else "none"})
    shape = shape_of(model)
    trained = trained_by(plan, model, shape)
    for step in plan.prepare:
        model = attach(model, step).model
    install_lean_ops(model)
    if recompute:
        enable_recompute(model)
        model.train()
    return plan, shape, trained, LossSum(model, 1024)


def batch(*lengths):
    rng = np.random.default_rng(0)
    return collate([Sample(ids=rng.integers(0, 320, n).astype(np.int32), loss_mask=np.arange(n) > n // 2, source_row=i)
                    for i, n in enumerate(lengths)])


@both
@all_ways
def test_parameters_are_those_of_the_model_that_trains(kind, way):
    _, shape, trained, module = built(kind, way)
    assert trained.trained(shape) == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert shape_of(skeleton(CONFIGS[kind])) == shape, "shapes from the config alone differ from those of the model"
    whole = AutoModelForCausalLM.from_config(CONFIGS[kind])
    assert shape.parameters == sum(p.numel() for p in whole.parameters())
    assert shape.tied == (kind == "llama") and shape.q_norm == (kind == "qwen3") and shape.known


@both
@all_ways
def test_weights_gradients_and_optimizer_state_in_bytes(kind, way):
    plan, shape, trained, module = built(kind, way)
    predicted = memory(plan, shape, trained, tokens=64, supervised=32)
    tensors = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if not n.endswith("_table"))]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in tensors}
    assert predicted.weights + predicted.adapter == pytest.approx(sum(held.values()), rel=0.05)
    probe = batch(40, 24)
    module.of(probe).backward()
    learned = [p for p in module.parameters() if p.requires_grad]
    assert predicted.gradients == sum(p.grad.nbytes for p in learned)
    optimizer = torch.optim.AdamW(learned)
    optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim)
    assert predicted.optimizer == state


def saved_bytes(module, micro):
    """Bytes of all tensors autograd keeps for the backward pass, each storage once, the model's own left out."""
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    seen, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or its address could be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module.of(micro)
    return sum(seen.values())


@both
@all_ways
def test_activations_within_five_percent_of_what_autograd_keeps(kind, way):
    plan, shape, trained, module = built(kind, way)
    micro = batch(100, 150, 6)
    head = 2 * shape.head * 4 / 2 if trained.full else 0  # the chunked loss keeps the head's gradient, counted under `head`
    picked = micro.num_supervised * shape.hidden * 4  # the gradient of the supervised hidden states, counted under `logits`
    measured = saved_bytes(module, micro) - head - picked
    predicted = memory(plan, shape, trained, tokens=micro.num_tokens, supervised=micro.num_supervised)
    assert predicted.activations == pytest.approx(measured, rel=0.05)


@both
def test_recompute_keeps_each_layers_input(kind):
    plan, shape, trained, module = built(kind, "lora", recompute=True)
    micro = batch(100, 150, 6)
    predicted = memory(plan, shape, trained, tokens=micro.num_tokens, supervised=micro.num_supervised).activations
    rows = micro.num_supervised * 4
    later = micro.num_tokens * sum(activation_bytes_per_layer(shape, trained, residual=4, compute=4)) + rows * shape.q
    picked = rows * shape.hidden
    assert saved_bytes(module, micro) - picked == pytest.approx(predicted - later, rel=0.05)


@both
@all_ways
def test_operations_against_a_counter(kind, way, monkeypatch):
    """torch counts its own matrix products as they run. It does not know the attention kernel, left out on both sides, nor addmm_,
    by which an adapter adds B (A x) and its gradient: 2 P T."""
    monkeypatch.setattr(native_train, "product_usable", lambda a, b: False)
    plan, shape, trained, module = built(kind, way)
    micro = batch(60, 90, 50)
    with FlopCounterMode(display=False) as counter:
        module.of(micro).backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    tokens = micro.num_tokens - micro.num_samples  # no document's last token is an input
    added = trained.adapter * tokens - after_attention(shape, trained)[1] * (tokens - micro.num_supervised)
    counted += 2 * added
    predicted = step_flops(plan, shape, trained, tokens=tokens, supervised=micro.num_supervised, squared_lengths=0)
    assert predicted == pytest.approx(counted, rel=0.03)


def samples(n=50, low=5, high=60, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for i in range(n):
        size = int(rng.integers(low, high))
        found.append(Sample(ids=rng.integers(10, 300, size).astype(np.int32), loss_mask=np.arange(size) > size // 2, source_row=i))
    return SampleSet.of(found, source="made up", format="prompt")


def test_preflight_of_a_run(tokenizers_by_name):
    train, plan = samples(), recipe("qlora", optim={"batch": 16, "micro_tokens": 128, "epochs": 2, "warmup": 3},
                                    export=[{"spec": "w4g32"}, {"spec": "w8"}])
    found = preflight(plan, CONFIGS["llama"], tokenizers_by_name["chatml"], train, samples(8, seed=1), rate=RATE)
    assert (found.steps, found.steps_per_epoch, found.last_step_samples, found.warmup_steps) == (8, 4, 2, 3)
    assert found.step_tokens * 4 == pytest.approx(train.counts.tokens) and found.largest_micro_tokens <= 128
    assert found.parameters.trained + found.parameters.frozen == found.parameters.total
    assert sum(n for _, _, n in found.lengths) == 50 and found.train["used"] == 50 and found.evaluation["used"] == 8
    assert "".join(t for t, _ in found.sample) == tokenizers_by_name["chatml"].decode(train[0].ids)
    moving = found.memory.activations + max(found.memory.logits + found.memory.head, found.memory.working)
    assert found.slack_bytes == round(SLACK * moving)
    assert found.peak_bytes == found.baseline_bytes + found.memory.peak + found.slack_bytes and found.total_seconds > 8 * found.step_seconds
    assert [e.spec for e in found.exports] == ["w4g32", "w8"] and found.exports[0].weight_bytes < found.exports[1].weight_bytes
    assert json.loads(json.dumps(found.to_json()))["memory"]["weights"] == found.memory.weights
    console = Console(width=140)
    with console.capture() as capture:
        console.print(render(found))
    text = capture.get()
    for expected in ("made up", "tokens per sample", "carries loss", "parameters trained", "activations", "peak", "w4g32",
                     "8 (3 of warm-up)", "the last of an epoch 2"):
        assert expected in text, expected


def test_supervised_text_is_coloured(tokenizers_by_name):
    found = preflight(recipe(), CONFIGS["llama"], tokenizers_by_name["chatml"], samples(), rate=RATE)
    console = Console(width=140, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(render(found))
    assert "\x1b[1;32m" in capture.get() and "\x1b[2m" in capture.get()


def test_ranks_share_the_work(tokenizers_by_name):
    one, two = (preflight(recipe("lora", optim={"micro_tokens": 64}), CONFIGS["llama"], tokenizers_by_name["chatml"], samples(),
                          world=world, rate=RATE) for world in (1, 2))
    assert two.step_tokens == pytest.approx(one.step_tokens) and two.steps == one.steps
    assert two.step_seconds == pytest.approx(one.step_seconds / 2, rel=0.05)


def test_memory_is_that_of_the_rows_which_the_runs_steps_compute(tokenizers_by_name):
    """Rows past a document's last loss are not computed; micro-batches after the last step are not met."""
    longest = Sample(ids=np.arange(300, dtype=np.int32) % 320, loss_mask=(np.arange(300) > 10) & (np.arange(300) < 40), source_row=9)
    train = SampleSet.of([*(samples(7)[i] for i in range(7)), longest], source="made up", format="chat")
    plan = recipe("lora", data={"train": "x", "shuffle": False}, optim={"batch": 4, "micro_tokens": 512, "epochs": 1})
    first = plan.model_copy(update={"optim": plan.optim.model_copy(update={"steps": 1})})
    whole, one = (preflight(r, CONFIGS["llama"], tokenizers_by_name["chatml"], train, rate=RATE) for r in (plan, first))
    shape = shape_of(skeleton(CONFIGS["llama"]))

    def activations(rows, supervised):
        trained = trained_by(plan, skeleton(CONFIGS["llama"]), shape)
        return memory(plan, shape, trained, tokens=rows, supervised=supervised).activations

    def computed(members):
        parts = [np.flatnonzero(train[i].loss_mask) for i in members]
        return sum(int(p[-1]) for p in parts), sum(int((p > 0).sum()) for p in parts)

    assert one.memory.activations == activations(*computed(range(4)))
    assert whole.memory.activations == max(activations(*computed(range(4))), activations(*computed(range(4, 8))))
    assert whole.largest_micro_tokens == int(train.lengths[4:].sum())


def test_ranks_that_share_a_batch_keep_their_part_of_it(tokenizers_by_name):
    one, two = (preflight(recipe("lora", run={"context_parallel": n}), CONFIGS["llama"], tokenizers_by_name["chatml"], samples(),
                          world=n, rate=RATE) for n in (1, 2))
    assert two.memory.activations == pytest.approx(one.memory.activations / 2, rel=0.1) and two.micro_batches == one.micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_the_predicted_peak_is_within_ten_percent_of_the_resident_one(tmp_path, name):
    """SmolLM2-135M, three steps of four samples; prediction and run in processes of their own."""
    settings = [f"run.output={tmp_path / 'run'}", "track.to=none", "export=[]", "data.eval=null", "optim.batch=4", "optim.steps=3"]
    code = ("import sys, json\nfrom karui.configs.recipe import Recipe\nrecipe = Recipe.load(sys.argv[3], json.loads(sys.argv[2]))\n"
            "if sys.argv[1] == 'plan':\n    from karui.trainers.preflight import dry_run\n    print(dry_run(recipe).peak_bytes)\n"
            "else:\n    from karui.trainers.run import run_recipe\n    print(run_recipe(recipe).metrics['peak_memory_bytes'])\n")
    predicted, resident = (
        int(subprocess.run([sys.executable, "-c", code, what, json.dumps(settings), name], capture_output=True, text=True,
                           check=True).stdout.splitlines()[-1]) for what in ("plan", "run"))  # fmt: skip
    assert predicted == pytest.approx(resident, rel=0.1)


def test_warnings(tokenizers_by_name, monkeypatch):
    from dataclasses import replace

    from karui.trainers import preflight as module

    monkeypatch.setattr(module, "_machine", lambda: (1, 2))
    train = samples()
    counts = replace(train.counts, rows=60, dropped_overlong=5, truncated=3, unsupervised=4, duplicates=1, longest=999)
    found = preflight(recipe(), CONFIGS["llama"], tokenizers_by_name["chatml"], replace(train, counts=counts), rate=RATE)
    for expected in ("5 of 60 rows (8.3 %) are longer than data.max_length=1024 and are left out (the longest has 999",
                     "3 of 60 rows (5.0 %) are cut", "4 of 60 rows (6.7 %) have no token", "1 of 60 rows (1.7 %) repeat",
                     "is more than the 0.0 GB there are; lower optim.micro_tokens"):
        assert any(expected in w for w in found.warnings), expected
    assert not preflight(recipe(), CONFIGS["llama"], tokenizers_by_name["chatml"], train, rate=RATE).notes


@pytest.mark.parametrize("kind, message", [
    ("distil", "memory and time of the teacher .objective distil. are not predicted"),
    ("draft-medusa", "trains no weight of the model: parameters, memory and time are those of training it whole")])  # fmt: skip
def test_what_an_objective_adds_is_said_not_to_be_in_the_figures(kind, message, tokenizers_by_name):
    plan = recipe(objective={"kind": kind})
    found = preflight(plan, CONFIGS["llama"], tokenizers_by_name["chatml"], samples(), rate=RATE)
    assert any(re.search(message, w) for w in found.warnings)


def test_an_exported_mixtures_experts_are_counted_on_their_grid(tokenizers_by_name):
    config = MixtralConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, num_local_experts=4)
    plan = recipe(export=[{"spec": "w4g32", "embedding": "none"}, {"spec": "none", "embedding": "none"}])
    four, whole = preflight(plan, config, tokenizers_by_name["chatml"], samples(), rate=RATE).exports
    experts = 2 * 4 * 3 * 64 * 96
    assert whole.weight_bytes - four.weight_bytes > experts * 3.4  # of 4 bytes a weight, 4 bits and scales are left


def test_bad_targets_and_ranks_show_before_any_weight_is_loaded(tokenizers_by_name):
    for change, message in (({"targets": "q_prj"}, "Did you mean 'q_proj'"), ({"rank": 999}, "rank 999 is above")):
        plan = Recipe.build({"model": "x", "data": {"train": "x"}, "prepare": [{"method": "lora", **change}]})
        with pytest.raises(KaruiError, match=message):
            preflight(plan, CONFIGS["llama"], tokenizers_by_name["chatml"], samples(), rate=RATE)


def test_histogram_covers_every_sample():
    for lengths in ([7], [1, 1, 1], list(range(1, 1001)), [3, 500]):
        bars = histogram(np.array(lengths))
        assert sum(n for _, _, n in bars) == len(lengths) and len(bars) <= 11
        assert all(a[1] == b[0] for a, b in zip(bars, bars[1:]))
    assert histogram(np.array([], np.int64)) == ()


def test_pieces_cut_where_supervision_changes(tokenizers_by_name):
    tokenizer = tokenizers_by_name["chatml"]
    text = "what is 6 * 7? hello there 42 foxes"
    ids = tokenizer(text)["input_ids"]
    mask = np.zeros(len(ids), bool)
    mask[2:4] = mask[-1] = True
    found = pieces(SampleSet.of([Sample(ids=np.array(ids, np.int32), loss_mask=mask, source_row=0)]), tokenizer)
    assert "".join(t for t, _ in found) == text and [s for _, s in found] == [False, True, False, True]


def test_dry_run_reads_config_and_tokenizer_only(tmp_path, tokenizers_by_name, write):
    CONFIGS["llama"].save_pretrained(tmp_path / "model")
    tokenizers_by_name["chatml"].save_pretrained(tmp_path / "model")
    data = write("p.jsonl", [{"prompt": "a?", "completion": f"{i}"} for i in range(9)])
    plan = Recipe.build({"model": str(tmp_path / "model"), "data": {"train": data, "holdout": 2}, "prepare": PREPARE["lora"]})
    found = dry_run(plan)
    assert found.train["used"] == 7 and found.evaluation["used"] == 2 and found.rate.flops_per_s > 0
