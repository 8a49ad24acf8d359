"""Workers for the agent and for ``launch``: templates that fork them, and PyTorch's elastic agent above."""
