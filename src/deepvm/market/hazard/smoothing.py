"""Forward and backward passes over a hidden chain, vectorised in blocks: evidence by tick in, chances of states out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST = 1e-300


def log_evidence(start: Floats, change: Floats, evidence: Floats) -> float:
    """Return the log-probability of the evidence, [tick, state]: products of matrices, pair by pair."""
    if not len(evidence):
        return 0.0
    products = change * evidence[:, None, :]
    logs = 0.0
    while len(products) > 1:
        if len(products) % 2:
            products = np.concatenate([products, np.eye(len(start))[None]])
        products = products[::2] @ products[1::2]
        scale = np.maximum(products.sum(axis=(1, 2), keepdims=True), _LEAST)
        logs += float(np.log(scale).sum())
        products = products / scale
    return logs + float(np.log(max(float((start @ products[0]).sum()), _LEAST)))


def smooth(start: Floats, change: Floats, evidence: Floats) -> tuple[Floats, Floats]:
    """Return what is known of the states before each tick from the past, and after it from the future, [tick, state].

    Rows are scaled to sum to one: their products with a tick's matrix are normalised by the caller.
    """
    ticks, states = evidence.shape
    length = max(1, int(np.ceil(np.sqrt(ticks))))
    blocks = -(-ticks // length)
    matrices = np.broadcast_to(np.eye(states), (blocks * length, states, states)).copy()
    matrices[:ticks] = change * evidence[:, None, :]
    matrices = matrices.reshape(blocks, length, states, states)
    whole = matrices[:, 0]
    for at in range(1, length):
        whole = whole @ matrices[:, at]
        whole = whole / np.maximum(whole.sum(axis=(1, 2), keepdims=True), _LEAST)
    first, last = np.empty((blocks, states)), np.empty((blocks, states))
    past, future = start, np.full(states, 1 / states)
    for block in range(blocks):
        first[block] = past
        past = _scaled(past @ whole[block])
        last[blocks - 1 - block] = future
        future = _scaled(whole[blocks - 1 - block] @ future)
    before, after = np.empty((blocks, length, states)), np.empty((blocks, length, states))
    for at in range(length):
        before[:, at] = first
        first = _scaled((first[:, None, :] @ matrices[:, at])[:, 0])
        back = length - 1 - at
        after[:, back] = last
        last = _scaled((matrices[:, back] @ last[:, :, None])[:, :, 0])
    return before.reshape(-1, states)[:ticks], after.reshape(-1, states)[:ticks]


def _scaled(rows: Floats) -> Floats:
    return np.asarray(rows / np.maximum(rows.sum(axis=-1, keepdims=True), _LEAST))
