"""``python -m fastlinear``: the command line without its console script."""

from fastlinear.cli import main

if __name__ == "__main__":
    main()
