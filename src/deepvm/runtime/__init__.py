"""Runs a plan: machines, their hub and their ledger, and templates that fork workers."""

from deepvm.runtime.workers.template import DEFAULT_PRELOAD, Template
from deepvm.runtime.workers.worker import Worker

__all__ = ["DEFAULT_PRELOAD", "Template", "Worker"]
