"""Losses that train drafts of a frozen target: an EAGLE-3 layer, Medusa heads. The modules come in from outside, by protocol.

A whole small draft model needs nothing of its own: it is a pruned student under `objective: distil`.
"""
