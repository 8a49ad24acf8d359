"""Calibration: what a roofline fitted here predicts for configurations that it has not seen, beside what they take."""
