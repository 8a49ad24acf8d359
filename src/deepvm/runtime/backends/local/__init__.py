"""Machines played on this host: process trees, and network namespaces where asked for."""
