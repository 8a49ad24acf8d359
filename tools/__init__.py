"""Commands of development that `make` calls; nothing here is part of the package."""
