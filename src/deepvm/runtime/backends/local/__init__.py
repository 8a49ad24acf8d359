"""Machines of a run as process trees of this host, in network namespaces with ``--isolate``."""
