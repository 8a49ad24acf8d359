"""A plan made real. So far: templates, processes with torch imported that fork workers."""

from deepvm.runtime.templates import DEFAULT_PRELOAD, Template, Worker

__all__ = ["DEFAULT_PRELOAD", "Template", "Worker"]
