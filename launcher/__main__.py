"""`python -m launcher` is the `diptych` command."""

from launcher.cli import main

if __name__ == "__main__":
    main()
