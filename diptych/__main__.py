"""`python -m diptych` is the `diptych` command."""

from diptych.cli.app import main

if __name__ == "__main__":
    main()
