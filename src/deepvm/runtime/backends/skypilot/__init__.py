"""Machines through SkyPilot."""
