"""`python -m intarsia`: the command line."""

from intarsia.cli.main import main

if __name__ == "__main__":
    main()
