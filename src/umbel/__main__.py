"""`python -m umbel`: the `umbel` command, for when its script is not on the path."""

from umbel.cli.main import main

if __name__ == "__main__":
    main()
