"""`python -m glm53` is the `glm53` command."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
