"""Speculative decoding: proposers guess, one lossless verifier decides. Start with base.py for the protocol.

    verify.py, random.py, tree.py     the verifier, its position-keyed randomness, the shape of a draft
    ngram.py, lookahead.py            guesses from the sequence itself
    draft_model.py, medusa.py, eagle3.py   guesses from a model
    adaptive.py                        off while it does not pay
    config.py, factory.py              `SpeculationConfig.parse("ngram:5")`, `Speculator(config, ...).new()` per request
"""
