"""``python -m mechheads`` is the same as the ``mechheads`` command."""

from mechheads.cli import main

if __name__ == "__main__":
    main()
