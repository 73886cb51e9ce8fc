"""LoRA served side by side on the real model: a batch of base and two adapters gives each what it gets alone; scores are peft's."""

import pytest
import torch

from karui.catalogue import resolve
from karui.inference.engine import Engine
from karui.inference.requests import Request, SamplingParams


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(resolve("smollm2-135m"), dtype=torch.float32)
        model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.04)
        folders.append(tmp_path_factory.mktemp("adapter"))
        model.save_pretrained(folders[-1])
    return folders


@pytest.mark.slow
def test_a_mixed_batch_gives_each_adapter_what_it_gets_alone(adapters):
    engine = Engine.load(str(resolve("smollm2-135m")), max_sequences=8)
    for name, folder in zip("ab", adapters):
        engine.load_adapter(name, folder)

    def run(group):
        requests = [Request(prompt=engine.encode(p), params=SamplingParams(max_tokens=12), adapter=a) for p, a in group]
        return [tuple(out.token_ids) for out in engine.generate(requests)]

    group = [(p, a) for p in ("The capital of Japan is", "Once upon a time") for a in (None, "a", "b")]
    together = run(group)
    assert together == [run([item])[0] for item in group]
    assert len(set(together)) > 2  # more answers than prompts: the adapters do something


@pytest.mark.slow
def test_scores_under_an_adapter_are_those_of_peft(adapters):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = resolve("smollm2-135m")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), str(adapters[0])).eval()
    engine = Engine.load(str(folder), runner="torch")
    engine.load_adapter("a", adapters[0])
    ids = engine.encode("The quick brown fox jumps over the lazy dog. It was a bright cold day in April.")
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(engine.score([ids], adapter="a")[0], wanted, atol=1e-4, rtol=0)
    assert float((engine.score([ids])[0] - wanted).abs().max()) > 0.01
