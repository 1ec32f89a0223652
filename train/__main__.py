"""`python -m train recipe.yaml [--dotted.key value ...]`."""

import os
import sys
from collections.abc import Sequence

from core.config import help_text
from core.errors import UserError, exit_status
from train.config import Recipe, load_recipe
from train.run import train

USAGE = """usage: python -m train RECIPE.yaml [--dotted.key value ...]

Trains a model from a recipe. Any key of the recipe can be replaced on the command line:
  python -m train recipes/demo.yaml --training.optimizer.learning_rate 1e-4
  python -m train recipes/demo.yaml --training.checkpoint.resume_from_checkpoint latest

Keys, types, defaults:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2.

    A run that SIGTERM or SIGINT stopped after a step exits with 143 or 130.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or "--help" in args or "-h" in args:
        print(USAGE + help_text(Recipe, color=sys.stdout.isatty()))
        return 0 if args else 2
    return exit_status(lambda: train(_alone(load_recipe(args[0], args[1:]))))


def _alone(recipe: Recipe) -> Recipe:
    """Refuses to be one of several processes, which would all write the same run."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(f"training runs in one process in this version, WORLD_SIZE is {os.environ['WORLD_SIZE']}")
    return recipe


if __name__ == "__main__":
    sys.exit(main())
