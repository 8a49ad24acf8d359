"""``python -m deepvm`` is ``deepvm``."""

from deepvm.cli import main

if __name__ == "__main__":
    main()
