"""Requests for machines in, changes of their state out; base.py is the contract, each folder one backend."""
