"""`python -m commlib` is the `commlib` command."""

from commlib.cli import main

if __name__ == "__main__":
    main()
