"""A training script or a model's name in, a Job for the planner out. Scripts run in a process of their own."""

from __future__ import annotations

from deepvm.calibrate.job.model_job import profile_model
from deepvm.calibrate.job.script import profile_script

__all__ = ["profile_model", "profile_script"]
