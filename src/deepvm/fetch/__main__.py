"""``python -m deepvm.fetch``, the same as ``deepvm-fetch``."""

import sys

from deepvm.fetch.command import main

sys.exit(main())
