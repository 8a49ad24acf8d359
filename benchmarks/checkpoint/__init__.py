"""Saves into a memory node beside the published scheme and peers; saves that share chunks."""
