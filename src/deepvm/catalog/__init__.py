"""Price lists in; instances, offers and quotas out: built-in files, imports, live sources. For plans."""

from deepvm.catalog.library import load, names, save
from deepvm.catalog.model import Catalog, Instance, Market, Offer, Prices, Quota, binding_quotas

__all__ = ["Catalog", "Instance", "Market", "Offer", "Prices", "Quota", "binding_quotas", "load", "names", "save"]
