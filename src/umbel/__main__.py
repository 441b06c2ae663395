"""`python -m umbel`: the command `umbel`, where its script is not on the path."""

from umbel.cli.main import main

if __name__ == "__main__":
    main()
