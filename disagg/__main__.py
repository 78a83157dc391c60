"""`python -m disagg`: the command line."""

from disagg.cli.app import main

if __name__ == "__main__":
    main()
