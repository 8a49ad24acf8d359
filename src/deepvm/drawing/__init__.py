"""Figures in one style: paths and a size in, files with the same bytes on every run out. For paper and calibrate."""
