"""Machines on EC2."""
