"""The paper's data in; its tables and figures, reproduced and compared, out. ``deepvm reproduce`` calls it."""

from deepvm.paper.reproduce import Reproduction, reproduce

__all__ = ["Reproduction", "reproduce"]
