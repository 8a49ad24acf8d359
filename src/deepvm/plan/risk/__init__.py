"""Plans under a spot market: a space of clusters and a market in; clusters with a conduct and what to expect out.

``plan.planner`` calls ``search``; ``plan.explain`` calls ``reasons``. The simulator replays the candidates.
"""
