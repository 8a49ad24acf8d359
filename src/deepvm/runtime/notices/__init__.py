"""Where machines learn that they will be taken away."""

from deepvm.runtime.notices.base import Notice, NoticeSource
from deepvm.runtime.notices.sources import open_source
from deepvm.runtime.notices.watch import Watch

__all__ = ["Notice", "NoticeSource", "Watch", "open_source"]
