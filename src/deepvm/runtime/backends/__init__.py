"""Where machines come from; base.py is the contract, each folder one backend."""
