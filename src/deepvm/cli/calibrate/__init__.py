"""The commands that measure: ``deepvm profile`` for a job, ``deepvm calibrate`` for machines."""
