"""Hot weight update on the real model: the engine then says what one loaded with the new weights says, and remembers nothing."""

import pytest
import torch

from karui.catalogue import resolve
from karui.inference.engine import Engine
from karui.inference.requests import SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["native", "torch"])
def test_an_updated_engine_is_the_engine_of_the_new_weights(runner, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = Engine.load(str(folder), runner=runner)
    prompt, params = engine.encode("The capital of Japan is"), SamplingParams(max_tokens=16)
    before = engine.generate([prompt], params)[0]
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "down_proj" in name:
                parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
    assert engine.update_weights({n: p.detach() for n, p in model.state_dict().items() if n != "lm_head.weight"}) == 1
    after = engine.generate([prompt], params)[0]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    fresh = Engine.load(str(tmp_path), runner=runner).generate([prompt], params)[0]
    assert after.token_ids == fresh.token_ids != before.token_ids
    assert after.num_cached_tokens == 0
    engine.check_integrity()
