"""`python -m kitbuild`: the same command line."""

from kitbuild.cli import main

if __name__ == "__main__":
    main()
