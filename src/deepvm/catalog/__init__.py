"""What can be rented: instances, offers and quotas, from built-in files, imports and live sources."""

from deepvm.catalog.library import load, names, save
from deepvm.catalog.model import Catalog, Instance, Market, Offer, Prices, Quota, binding_quotas

__all__ = ["Catalog", "Instance", "Market", "Offer", "Prices", "Quota", "binding_quotas", "load", "names", "save"]
