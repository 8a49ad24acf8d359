"""A plan replayed again: what a plan writes down of its replays in, the same figures out.

``plan.risk.decide`` writes a ``Replay`` into every recommendation; ``deepvm simulate plan.json`` reads it.
"""
