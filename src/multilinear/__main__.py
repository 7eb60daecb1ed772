"""`python -m multilinear`, which is also how torchrun starts it."""

from multilinear.cli import main

if __name__ == "__main__":
    main()
