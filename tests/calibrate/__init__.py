"""Tests of deepvm.calibrate."""
