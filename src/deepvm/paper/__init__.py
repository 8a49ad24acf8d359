"""The paper's tables and figures, made again and compared with what was published."""

from deepvm.paper.reproduce import Reproduction, reproduce

__all__ = ["Reproduction", "reproduce"]
