"""Directories as a store: ``file://``, staged files, mapped files."""
