"""Reference tests: the training-time test runs what the proposer runs, and its loss is autograd's over whole logits."""

import pytest
import torch

from karui.distill.drafts.eagle3 import acceptance_length, eagle3_loss
from karui.distill.drafts.medusa import medusa_loss
from karui.inference.speculative.base import Context, Observation
from karui.inference.speculative.eagle3 import Eagle3, Eagle3Config, Eagle3Proposer
from karui.inference.speculative.medusa import MedusaHeads

V, D, H = 30, 12, 16


@pytest.fixture
def parts():
    torch.manual_seed(0)
    ids = torch.randperm(V)[:D].sort().values
    layer = Eagle3(Eagle3Config(hidden_size=H, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=V,
                                draft_vocab_size=D, aux_layers=(0, 1)), ids)
    n = 9
    table, head = torch.randn(V, H), torch.randn(V, H)
    tokens, hidden = torch.randint(0, V, (n,)), torch.randn(n, H)
    return {"layer": layer, "ids": ids, "table": table, "head": head, "tokens": tokens, "hidden": hidden, "aux": torch.randn(n, 2 * H),
            "best": (hidden @ head.T).argmax(-1)}


def loss(p, steps, soft=True, supervised=None):
    n = len(p["tokens"])
    return eagle3_loss(p["layer"], aux=p["aux"], embeddings=p["table"][p["tokens"]], hidden=p["hidden"], head=p["head"][p["ids"]],
                       ids=p["ids"], best=p["best"], supervised=torch.ones(n, dtype=torch.bool) if supervised is None else supervised,
                       steps=steps, decay=0.8, soft=soft, chunk=3)


@pytest.mark.parametrize("prompt", [0, 2, 6])
@pytest.mark.parametrize("soft", [True, False])
def test_the_loss_by_brute_force(parts, soft, prompt):
    """Every root and chain run on its own, one row at a time, with the layer's own KV; a prompt carries no loss."""
    p, layer = parts, parts["layer"]
    n, embeddings = len(p["tokens"]), parts["table"][parts["tokens"]]
    p["best"][3], p["best"][7] = p["ids"][1], p["ids"][4]
    wanted = 0.0
    for t in range(n - 1):
        kv, mask = layer.empty_kv(), torch.ones(t + 1, t + 1, dtype=torch.bool).tril()
        a, kv = layer(embeddings[1 : t + 2], layer.fuse(p["aux"])[: t + 1], torch.arange(t + 1), kv, mask)
        a = a[-1:]
        for i in range(3):
            at = t + 1 + i
            if at >= n:
                break
            if i:
                a, kv = layer(embeddings[at : at + 1], a, torch.tensor([t + i]), kv, torch.ones(1, t + 1 + i, dtype=torch.bool))
            if p["best"][at] not in p["ids"] or at < prompt:
                continue
            log_q = layer.log_probs(a)[0]
            if soft:
                q = (p["hidden"][at] @ p["head"][p["ids"]].T).softmax(-1)
                value = (q * (q.log() - log_q)).sum()
            else:
                value = -log_q[(p["ids"] == p["best"][at]).nonzero()[0, 0]]
            wanted = wanted + 0.8**i * value
    ours = loss(p, 3, soft, torch.arange(n) >= prompt).loss_sum
    torch.testing.assert_close(ours, wanted)
    leaves = [q for q in layer.parameters()]
    for a, b in zip(torch.autograd.grad(ours, leaves, allow_unused=True), torch.autograd.grad(wanted, leaves, allow_unused=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_counted_right_is_what_the_proposer_drafts(parts):
    p = parts
    n = len(p["tokens"])
    p["ids"] = torch.arange(V)
    p["layer"] = Eagle3(Eagle3Config(hidden_size=H, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=V,
                                     draft_vocab_size=V, aux_layers=(0, 1)))
    right = 0
    for t in range(n - 1):
        proposer = Eagle3Proposer(p["layer"], lambda ids: p["table"][ids], depth=1, width=1, nodes=1)
        tokens = p["tokens"][: t + 2].tolist()
        proposer.observe(Observation(0, tokens[:-1], tokens[-1:], aux=p["aux"][: t + 1]))
        right += proposer.propose(Context(tokens, 4)).tokens[0] == int(p["best"][t + 1])
    found = loss(p, 1)
    assert found.by_pass[0][1:] == (n - 1, right)
    assert acceptance_length([(0, 4, 2), (0, 4, 4)]) == pytest.approx(2.0)


def test_only_supervised_rows_count(parts):
    supervised = torch.zeros(9, dtype=torch.bool)
    supervised[5] = True
    found = loss(parts, 3, supervised=supervised)
    assert sum(rows for _, rows, _ in found.by_pass) <= 3
    assert loss(parts, 3, supervised=torch.zeros(9, dtype=torch.bool)).loss_sum == 0


@pytest.mark.parametrize("shared", [False, True])
def test_medusa_by_autograd(shared):
    torch.manual_seed(0)
    ids = torch.arange(16) if shared else None
    heads = MedusaHeads(3, H, V, 2, shared=shared, ids=ids)
    if shared:
        heads.bind(torch.randn(V, H))
    hidden, targets = torch.randn(8, H), torch.randint(0, V, (8,))
    supervised = torch.arange(8) > 2
    ours, figures = medusa_loss(heads, hidden=hidden, targets=targets, supervised=supervised, decay=0.5, ids=ids, chunk=2)
    wanted, counted, right = 0.0, [0, 0, 0], [0, 0, 0]
    rows = list(range(V)) if ids is None else ids.tolist()
    for i, logits in enumerate(heads(hidden)):
        for t in range(8 - 1 - i):
            target = int(targets[t + 1 + i])
            if supervised[t + 1 + i] and target in rows:
                wanted = wanted + 0.5**i * torch.nn.functional.cross_entropy(logits[t], torch.tensor(rows.index(target)))
                counted[i] += 1
                right[i] += rows[int(logits[t].argmax())] == target
    torch.testing.assert_close(ours, wanted)
    assert [f[1:] for f in figures] == [(n, r, 5) for n, r in zip(counted, right)] and (sum(counted) < 15) == shared
    leaves = list(heads.parameters())
    for a, b in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(wanted, leaves)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
