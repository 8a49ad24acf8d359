"""Types that a cloud stopped selling, while price lists still have them: a cloud and a name in, True for these out.

Azure retired Basic A in 2024, NC, NCv2, ND and NV of the first generations in 2023; its promotions have ended.
"""

from __future__ import annotations

import re

_AZURE = re.compile(r"basic_|.*_promo$|standard_nc\d+r?$|standard_nc\d+rs?_v2$|standard_nd\d+r?s$|standard_nv\d+$")


def is_ended(cloud: str, instance: str) -> bool:
    return cloud == "azure" and _AZURE.match(instance.lower()) is not None
