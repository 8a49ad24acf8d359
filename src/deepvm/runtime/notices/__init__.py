"""Preemption notices of clouds, files and signals -> one call for each."""

from deepvm.runtime.notices.base import Notice, NoticeSource
from deepvm.runtime.notices.sources import open_source
from deepvm.runtime.notices.watch import Watch

__all__ = ["Notice", "NoticeSource", "Watch", "open_source"]
